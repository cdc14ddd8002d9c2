"""kvpress' data in, kvpress' files out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specache_bench.cli import app
from specache_bench.lab import Lab
from specache_bench.tasks import Sample, make_samples
from specache_fx.errors import ConfigError

pandas = pytest.importorskip("pandas")
ROW = {
    "context": "The stone is red.",
    "question": " What is red?",
    "answer_prefix": " It is",
    "max_new_tokens": 4,
}


def samples(lab: Lab, file: object, number: int = 1, length: int = 200, **more: object) -> list[Sample]:
    return make_samples("data", lab, num_prompts=number, length=length, file=str(file), **more)


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [
        ROW | {"answer": [f"stone {i}", "it"], "task": "niah_single_1" if i % 2 else "qa_1"} for i in range(6)
    ]
    file = tmp_path / "ruler.parquet"
    pandas.DataFrame(rows).to_parquet(file)
    return str(file)


def test_rows_are_prompts_of_context_question_and_the_answers_opening(data: str, english: Lab) -> None:
    made = samples(english, data, 3, only="niah_single_1")
    assert {sample.prompt for sample in made} == {"The stone is red. What is red?\n It is"}
    assert [sample.answers for sample in made] == [(f"stone {i}", "it") for i in (1, 3, 5)]
    assert (made[0].context, made[0].question) == ("The stone is red.", " What is red?\n It is")
    assert (made[0].metric, made[0].max_new_tokens) == ("row:niah_single_1", 4)
    (chat,) = samples(english, data, chat=True)
    assert chat.context == "<bos>[user] The stone is red."
    assert chat.question == " What is red? [assistant]  It is"


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_longbench_rows_have_classes_and_empty_cells(form: str, english: Lab, tmp_path: Path) -> None:
    file = tmp_path / f"longbench.{form}"
    trec = {"answers": ["red", "[1]"], "task": "trec", "all_classes": ["red", "7"]}
    rows = [ROW | trec, ROW | {"answers": ["x = 1"], "task": "lcc", "question": "", "answer_prefix": None}]
    table = pandas.DataFrame(rows)
    getattr(table, f"to_{form}")(file, index=False)
    classified, code = samples(english, file, 2)
    assert (classified.answers, classified.classes) == (("red", "[1]"), ("red", "7"))
    assert (code.context, code.question, code.answers, code.classes) == (ROW["context"], "\n", ("x = 1",), ())


def test_files_that_are_none_or_too_small_are_named(data: str, english: Lab, tmp_path: Path) -> None:
    few = r"has 3 prompts of task 'qa_1' of up to 200 tokens: ask for fewer than 4"
    with pytest.raises(ConfigError, match=few):
        samples(english, data, 4, only="qa_1")
    with pytest.raises(ConfigError, match="has 0 prompts of up to 30 tokens"):
        samples(english, data, length=30)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    lacks = "other.csv has no column context, question, answer, max_new_tokens, task; it has a, b"
    with pytest.raises(ConfigError, match=lacks):
        samples(english, other)
    with pytest.raises(ConfigError, match=r"/nowhere.parquet can't be read as parquet or CSV .*Give such a"):
        samples(english, "/nowhere.parquet")
    for wrong in ({"depth": 0.5}, {"records": 3}):
        with pytest.raises(ConfigError, match="is data,file=FILE and, of a task in it, only=TASK"):
            samples(english, data, **wrong)


def test_both_modes_leave_the_files_of_kvpress(data: str, english_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f"eval --task data,file={data},agnostic=True --model {english_folder} --length 200 --prompts 6"
    command += f" --method full --dtype float32 --kvpress {out}"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert done.output.count("data, 200 tokens") == 2 and "question after it" in done.output
    made = sorted(path.name for path in out.iterdir())
    where = f"ruler__200__{english_folder.name}__full__question"
    assert made == [f"{where}_agnostic", f"{where}_aware"]
    tables = []
    for folder in sorted(out.iterdir()):
        assert {path.name for path in folder.iterdir()} == {"predictions.csv", "metrics.json", "config.yaml"}
        tables.append(pandas.read_csv(folder / "predictions.csv"))
        assert set(json.loads((folder / "metrics.json").read_text())) == {"niah_single_1", "qa_1"}
        assert "name: full" in (folder / "config.yaml").read_text()
    # The full cache is the same whether the question is read with its context or after it.
    assert list(tables[0]["predicted_answer"]) == list(tables[1]["predicted_answer"])
    assert {"task", "question", "answer", "max_new_tokens"} <= set(tables[0])


def test_kvpress_files_are_of_a_data_set(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["eval", "--task", "single", "--kvpress", str(tmp_path)])
    assert done.exit_code == 2 and "give --task data,file=FILE" in done.output
