"""kvpress' data in, kvpress' files out; and lm-eval's tasks through the model `specache-hf`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specache_bench.cli import app
from specache_bench.lab import Lab
from specache_bench.tasks import make_samples
from specache_fx.errors import ConfigError

pandas = pytest.importorskip("pandas")
ROW = {
    "context": "The stone is red.",
    "question": " What is red?",
    "answer_prefix": " It is",
    "max_new_tokens": 4,
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [
        ROW | {"answer": [f"stone {i}", "it"], "task": "niah_single_1" if i % 2 else "qa_1"} for i in range(6)
    ]
    file = tmp_path / "ruler.parquet"
    pandas.DataFrame(rows).to_parquet(file)
    return str(file)


def test_rows_are_prompts_of_context_question_and_the_answers_opening(data: str, english: Lab) -> None:
    samples = make_samples("data", english, num_prompts=3, length=200, data=data, only="niah_single_1")
    assert {sample.prompt for sample in samples} == {"The stone is red. What is red? It is"}
    assert [sample.answers for sample in samples] == [(f"stone {i}", "it") for i in (1, 3, 5)]
    assert (samples[0].context, samples[0].question) == ("The stone is red.", " What is red? It is")
    assert (samples[0].metric, samples[0].max_new_tokens) == ("row:niah_single_1", 4)
    (chat,) = make_samples("data", english, num_prompts=1, length=200, data=data, chat=True)
    assert (
        chat.context == "<bos>[user] The stone is red."
        and chat.question == " What is red? [assistant]  It is"
    )


def test_files_that_are_none_or_too_small_are_named(data: str, english: Lab, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has 3 prompts of task 'qa_1' of up to 200 tokens: ask for fewer than 4"
    ):
        make_samples("data", english, num_prompts=4, length=200, data=data, only="qa_1")
    with pytest.raises(ConfigError, match="has 0 prompts of up to 30 tokens"):
        make_samples("data", english, num_prompts=1, length=30, data=data)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ConfigError, match="has no column context, question, answer, max_new_tokens, task; it has a, b"
    ):
        make_samples("data", english, num_prompts=1, length=30, data=str(tmp_path / "other.csv"))
    with pytest.raises(ConfigError, match="can't be read as parquet or CSV"):
        make_samples("data", english, num_prompts=1, length=30, data="/nowhere.parquet")


def test_both_modes_leave_the_files_of_kvpress(data: str, english_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["eval", "--task", "data", "--data", data, "--model", str(english_folder), "--length", "200"]
    command += [
        "--prompts",
        "6",
        "--method",
        "full",
        "--question-agnostic",
        "--dtype",
        "float32",
        "--kvpress",
        str(out),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    names = sorted(path.name.rpartition("__")[2] for path in out.iterdir())
    assert names == ["question_agnostic", "question_aware"]
    tables = []
    for folder in sorted(out.iterdir()):
        assert {path.name for path in folder.iterdir()} == {"predictions.csv", "metrics.json", "config.yaml"}
        tables.append(pandas.read_csv(folder / "predictions.csv"))
        assert set(json.loads((folder / "metrics.json").read_text())) == {"niah_single_1", "qa_1"}
        assert "name: full" in (folder / "config.yaml").read_text()
    # The full cache is the same whether the question is read with its context or after it.
    assert list(tables[0]["predicted_answer"]) == list(tables[1]["predicted_answer"])
    assert {"task", "question", "answer", "max_new_tokens"} <= set(tables[0])


@pytest.mark.usefixtures("fresh_dynamo")
def test_lm_eval_measures_by_decoding(english_folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    import specache_bench.lm_eval_model  # noqa: F401  registers it

    given = {"pretrained": str(english_folder), "device": "cpu", "dtype": "float32", "batch_size": 1}
    pairs = [("The stone is red. " * 9, "It is."), ("A", "b")]
    found = {}
    ours = {"lowering": "eager", "group_size": 16, "residual_length": 16}
    for name, more in {"hf": {}, "specache-hf": {"bits": 16, **ours}, "low": {"bits": 1, **ours}}.items():
        made = (get_model("specache-hf") if more else HFLM)(**given, **more)
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        found[name] = made.loglikelihood(asked, disable_tqdm=True)
        text = [
            Instance(
                "generate_until", {}, (pairs[0][0], {"until": [], "max_gen_toks": 6, "do_sample": False}), 0
            )
        ]
        found[name].append(made.generate_until(text, disable_tqdm=True)[0])
        torch._dynamo.reset()
    for exact, plain in zip(found["specache-hf"][:2], found["hf"][:2], strict=True):
        assert exact[0] == pytest.approx(plain[0], abs=1e-3) and exact[1] == plain[1]
    assert found["specache-hf"][2] == found["hf"][2]
    assert found["low"][0][0] != pytest.approx(found["hf"][0][0], abs=1e-4)  # its codes were read
