"""RULER's and LongBench's files, in the official formats, as the tests write them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Bench
from specache_fx.eval.scoring import score
from specache_fx.eval.tasks import make_samples
from specache_fx.eval.tasks.longbench import KINDS


def write(file: Path, records: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def ruler(index: int, length: int = 1000, **more: str) -> dict:
    text = f"A special magic number for stone is hidden: {index}."
    return {"index": index, "input": text, "outputs": [str(index)], "length": length, **more}


def longbench(index: int, context: str = "Some text.", **more: object) -> dict:
    return {
        "input": f"question {index}?",
        "context": context,
        "answers": [f"answer {index}", "another"],
        "length": 3,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": str(index),
        **more,
    }


def made(task: str, data: Path, bench: Bench, *, num_prompts: int = 2, length: int = 1024, **more: object):
    return make_samples(task, bench, num_prompts=num_prompts, length=length, data=data, **more)


@pytest.mark.parametrize(
    "path", ["1024/data/vt/validation.jsonl", "1024/vt/validation.jsonl", "vt/validation.jsonl", "vt.jsonl"]
)
def test_ruler_is_read_from_every_layout(path: str, tmp_path: Path, english: Bench) -> None:
    write(tmp_path / path, [ruler(i) for i in range(5)])
    samples = made("ruler/vt", tmp_path, english, num_prompts=5)
    assert [sample.answers for sample in samples] == [(str(i),) for i in range(5)]
    assert {sample.max_new_tokens for sample in samples} == {30}
    assert [score(sample, f"it is {i}") for i, sample in enumerate(samples)] == [1] * 5


def test_ruler_gives_the_length_that_is_asked_for(tmp_path: Path, english: Bench) -> None:
    for length in (512, 1024):
        write(tmp_path / str(length) / "vt" / "validation.jsonl", [ruler(length, length)])
    for length in (512, 1024):
        (sample,) = made("ruler/vt", tmp_path, english, num_prompts=1, length=length)
        assert sample.answers == (str(length),)
    with pytest.raises(ConfigError, match=r"no 2048/data/vt/validation.jsonl \(lengths there: 512, 1024\)"):
        made("ruler/vt", tmp_path, english, length=2048)


@pytest.mark.parametrize("length", [500, 4096])
def test_ruler_without_a_length_in_its_path_is_checked_by_its_records(
    length: int, tmp_path: Path, english: Bench
) -> None:
    write(tmp_path / "vt.jsonl", [ruler(i) for i in range(3)])
    with pytest.raises(ConfigError, match=rf"prompts of up to 1,000 tokens, not of length {length:,}"):
        made("ruler/vt", tmp_path, english, length=length)


def test_ruler_puts_the_answers_opening_behind_the_question(tmp_path: Path, english: Bench) -> None:
    write(tmp_path / "1024" / "qa_1.jsonl", [ruler(7, answer_prefix=" Answer:")])
    (plain,) = made("ruler/qa_1", tmp_path, english, num_prompts=1)
    assert plain.prompt == "A special magic number for stone is hidden: 7. Answer:"
    (chat,) = made("ruler/qa_1", tmp_path, english, num_prompts=1, chat=True)
    assert chat.prompt.endswith("7. [assistant] Answer:")
    assert score(plain, "7 or 8") == 1


def test_prompts_are_drawn_by_the_seed(tmp_path: Path, english: Bench) -> None:
    write(tmp_path / "1024" / "vt.jsonl", [ruler(i) for i in range(50)])
    drawn = [[s.answers for s in made("ruler/vt", tmp_path, english, seed=seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ConfigError, match="has 50 records: ask for as many prompts or fewer, not 51"):
        made("ruler/vt", tmp_path, english, num_prompts=51)


def test_longbench_has_the_tasks_of_the_papers_tables() -> None:
    assert {
        "qasper",
        "multifieldqa_en",
        "hotpotqa",
        "2wikimqa",
        "musique",
        "gov_report",
        "multi_news",
        "passage_retrieval_en",
        "lcc",
        "repobench-p",
    } <= set(KINDS)
    for kind in KINDS.values():
        assert "{context}" in kind["prompt"]


@pytest.mark.parametrize("path", ["qasper.jsonl", "data/qasper.jsonl"])
def test_longbench_asks_in_its_own_words(path: str, tmp_path: Path, english: Bench) -> None:
    write(tmp_path / path, [longbench(0, "Words {with} braces."), longbench(1)])
    first, _ = made("longbench/qasper", tmp_path, english, length=4000)
    assert first.prompt.startswith(
        "You are given a scientific article and a question. Answer the question as"
    )
    assert "Article: Words {with} braces.\n\n Answer the question based" in first.prompt
    assert first.prompt.endswith("Question: question 0?\n\nAnswer:")
    assert first.answers == ("answer 0", "another")
    assert first.max_new_tokens == 128
    assert score(first, "Another!") == 1


def test_longbench_cuts_the_middle_of_what_is_too_long(tmp_path: Path, english: Bench) -> None:
    write(tmp_path / "qasper.jsonl", [longbench(0, "x" * 5000)])
    (whole,) = made("longbench/qasper", tmp_path, english, num_prompts=1, length=9000)
    (cut,) = made("longbench/qasper", tmp_path, english, num_prompts=1, length=1001)
    # 500 tokens of each end; <bos> is one of the first and is put back when the text is tokenised again.
    assert cut.prompt == whole.prompt[:499] + whole.prompt[-500:]
    assert len(english.encode(cut.prompt)) == 1000


def test_longbench_uses_a_chat_template_but_for_few_shot_and_code(tmp_path: Path, english: Bench) -> None:
    classes = ["Person", "City"]
    write(tmp_path / "qasper.jsonl", [longbench(0)])
    write(tmp_path / "trec.jsonl", [longbench(0, answers=["City"], all_classes=classes)])
    (asked,) = made("longbench/qasper", tmp_path, english, num_prompts=1, length=4000, chat=True)
    (shots,) = made("longbench/trec", tmp_path, english, num_prompts=1, length=4000, chat=True)
    assert asked.prompt.startswith("<bos>[user] You are given")
    assert shots.prompt.startswith("Please determine the type")
    assert shots.classes == ("Person", "City")
    assert score(shots, "City\nPerson") == 1


def test_data_set_of_the_hub_is_read_by_the_library(tmp_path: Path, english: Bench, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # To the library, a folder with a README that lists configurations is what a data set of the hub is.
    folder = tmp_path / "hub" / "LongBench"
    write(folder / "qasper" / "test.jsonl", [longbench(i) for i in range(3)])
    config = "configs:\n- config_name: qasper\n  data_files:\n  - split: test\n    path: qasper/test.jsonl\n"
    (folder / "README.md").write_text(f"---\n{config}---\n")
    from specache_fx.eval.tasks.records import read_hub

    records = read_hub(str(folder), "qasper", ("input", "context"))
    assert [record["input"] for record in records] == [f"question {i}?" for i in range(3)]
    with pytest.raises(ConfigError, match="there is no 'outputs'; it has input, context"):
        read_hub(str(folder), "qasper", ("outputs",))
    with pytest.raises(ConfigError, match="with configuration 'hotpotqa' can't be loaded"):
        read_hub(str(folder), "hotpotqa", ("input",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "qasper.jsonl, line 1 is no JSON"),
        ('{"input": "x"}\n', "line 1: there is no 'context', 'answers', 'all_classes'; it has input"),
        ("[1]\n", "it is no object"),
        ("\n", "has no records"),
    ],
)
def test_broken_files_are_named(content: str, message: str, tmp_path: Path, english: Bench) -> None:
    (tmp_path / "qasper.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        made("longbench/qasper", tmp_path, english)


@pytest.mark.parametrize("answers", ["1679215", [], None, [None]], ids=repr)
def test_answers_that_are_no_list_of_texts_are_refused(
    answers: object, tmp_path: Path, english: Bench
) -> None:
    """A text would be taken for a list of its letters, and scored."""
    write(tmp_path / "qasper.jsonl", [longbench(0, answers=answers)])
    with pytest.raises(ConfigError, match=r"'answers' is .*, and should be a list of one or more texts"):
        made("longbench/qasper", tmp_path, english, num_prompts=1)


def test_lines_end_where_json_says(tmp_path: Path, english: Bench) -> None:
    record = longbench(0, "one\u2028two\x85three")
    (tmp_path / "qasper.jsonl").write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    (sample,) = made("longbench/qasper", tmp_path, english, num_prompts=1, length=4000)
    assert "one\u2028two\x85three" in sample.prompt


def test_other_encodings_and_files_in_the_place_of_folders_are_named(tmp_path: Path, english: Bench) -> None:
    file = tmp_path / "qasper.jsonl"
    file.write_bytes(json.dumps(longbench(0, "\xe9"), ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ConfigError, match=r"qasper.jsonl can't be read as UTF-8 text"):
        made("longbench/qasper", tmp_path, english)
    for task in ("longbench/qasper", "ruler/vt"):
        with pytest.raises(ConfigError, match="is a file: give --data the folder that it is in"):
            made(task, file, english)
        with pytest.raises(ConfigError, match="There is no folder"):
            made(task, tmp_path / "nowhere", english)


def test_folder_without_the_task_says_what_it_has(tmp_path: Path, english: Bench) -> None:
    write(tmp_path / "qasper.jsonl", [longbench(0)])
    with pytest.raises(ConfigError, match=r"has no hotpotqa.jsonl \(it has qasper\). Give --data"):
        made("longbench/hotpotqa", tmp_path, english)
    with pytest.raises(ConfigError, match="there are no lengths in it"):
        made("ruler/vt", tmp_path, english)
