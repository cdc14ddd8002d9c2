"""How an answer is scored, 0 to 1. LongBench's metrics are lm-eval's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from specache_fx.errors import ConfigError

Metric = Callable[[str, Sequence[str]], float]


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in the prediction, case aside (RULER's for all tasks but QA)."""
    said = prediction.lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if any of the answers occurs in the prediction, case aside (RULER's for QA)."""
    said = prediction.lower()
    return float(any(answer.lower() in said for answer in answers))


def whole_words(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that the prediction has as whole words, in the words of our own models."""
    said = f" {' '.join(prediction.split())} "
    return sum(f" {answer} " in said for answer in answers) / len(answers)


def words_in_place(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answer's words that the prediction has at their places, in the words of our own models."""
    words, said = " ".join(answers).split(), prediction.split()
    return sum(a == b for a, b in zip(words, said, strict=False)) / len(words)


def copying(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answer's words that the prediction has in that order, by difflib's matching blocks."""
    words = " ".join(answers).split()
    blocks = difflib.SequenceMatcher(None, words, prediction.split(), autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(words)


def fields(prediction: str, answers: Sequence[str]) -> float:
    """The share of the table's fields that the prediction has in its row; rows are found by their first field."""
    said = [[field.strip() for field in line.split("|")] for line in prediction.splitlines()]
    rows = {row[0]: row for row in reversed(said)}  # of rows that say the same first, the first counts
    right = [[field.strip() for field in answer.split("|")] for answer in answers]
    hits = sum(a == b for row in right for a, b in zip(row, rows.get(row[0], []), strict=False))
    return hits / sum(map(len, right))


METRICS: dict[str, Metric] = {
    made.__name__: made
    for made in (string_match_all, string_match_part, whole_words, words_in_place, copying, fields)
}

_RULER = ("niah", "vt", "cwe", "fwe", "qa_")  # how its tasks' names begin


def score(metric: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """By one of `METRICS`; "row:TASK" is a data set's: LongBench's tasks as lm-eval has them, all others as RULER's.

    Raises:
        ConfigError: If the task is none of RULER's and lm-eval is not installed.
    """
    if metric in METRICS:
        return METRICS[metric](prediction, answers)
    task = metric.removeprefix("row:").removesuffix("_e").removesuffix("-e")
    if task.startswith(_RULER):
        return (string_match_part if task.startswith("qa_") else string_match_all)(prediction, answers)
    try:
        from lm_eval.tasks.longbench import metrics
    except ImportError as error:
        raise ConfigError(
            f"Task {task!r} is none of RULER's. The metrics of LongBench's are lm-eval's: pip install"
            f" 'specache-bench[eval]' ({error})."
        ) from error
    if not (file := Path(metrics.__file__).parent / f"{task}.yaml").is_file():
        return string_match_all(prediction, answers)
    rules = file.read_text(encoding="utf-8")
    if 'until: ["\\n"]' in rules:  # an answer is a line
        prediction = prediction.lstrip("\n").split("\n")[0]
    (name,) = re.findall(r"!function metrics\.(\w+)", rules)
    document = {"answers": list(answers), "all_classes": list(classes)}
    return float(getattr(metrics, name)(document, [prediction])["score"])
