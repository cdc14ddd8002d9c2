"""Which metric scores which task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specache_fx.errors import ConfigError
from specache_fx.eval.metrics import METRICS
from specache_fx.eval.sample import Sample
from specache_fx.eval.tasks import longbench, ruler
from specache_fx.eval.tasks.english import ENGLISH


@dataclass(frozen=True)
class Scoring:
    """How a task's answers are scored.

    Attributes:
        metric: In `METRICS`.
        first_line: What the model says after its first line is not looked at.
    """

    metric: str
    first_line: bool = False


SCORING: dict[str, Scoring] = {
    # In English words and in our own models' alike.
    **{
        task: Scoring({"copying": "copying", "table": "fields"}.get(task, "string_match_all"))
        for task in ENGLISH
    },
    **{f"ruler/{name}": Scoring(kind.metric) for name, kind in ruler.KINDS.items()},
    **{
        f"longbench/{name}": Scoring(kind["metric"], kind["first_line"])
        for name, kind in longbench.KINDS.items()
    },
}


def score_turns(sample: Sample, predictions: Sequence[str]) -> tuple[float, ...]:
    """0 to 1 for each turn of a sample, the prompt's first."""
    turns = [sample, *(replace(sample, answers=turn.answers) for turn in sample.turns)]
    return tuple(score(turn, said) for turn, said in zip(turns, predictions, strict=True))


def score(sample: Sample, prediction: str) -> float:
    """0 to 1: how well a prediction answers a sample, by its own metric or its task's.

    Raises:
        ConfigError: If there is no such task.
    """
    if sample.task not in SCORING:
        raise ConfigError(f"There is no task {sample.task!r}. Tasks: {', '.join(SCORING)}.")
    scoring = SCORING[sample.task]
    if scoring.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return METRICS[sample.metric or scoring.metric](prediction, sample.answers, sample.classes)
