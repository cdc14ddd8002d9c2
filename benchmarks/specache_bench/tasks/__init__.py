"""Tasks: `make_samples` gives prompts with their answers, built for a model or read from a data set.

A task is one function in `english.py` and one line in its table; the suite model has its own words for them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from specache_bench.records import check_options
from specache_bench.tasks.building import Draft, Sample, Writer, fit
from specache_bench.tasks.data_set import read_samples
from specache_bench.tasks.english import ENGLISH
from specache_fx.errors import ConfigError
from specache_fx.examples import suite

if TYPE_CHECKING:
    from specache_bench.lab import Lab

__all__ = ["Sample", "make_samples"]

_METRICS = {"copying": "copying", "table": "fields"}
_SUITE_METRICS = {"copying": "words_in_place"}


def make_samples(
    task: str,
    lab: Lab,
    *,
    num_prompts: int,
    length: int,
    seed: int = 0,
    depth: float | None = None,
    chat: bool = False,
    **knobs: Any,
) -> list[Sample]:
    """Prompts of a task for a model.

    Args:
        task: In `ENGLISH`, one of the suite model's, or "data".
        lab: The model; "suite" is asked in its own words.
        num_prompts: How many; the seed draws a data set's.
        length: Tokens of prompt and answer together; of the prompt alone for the suite model. A data set's
            longer prompts are left out.
        seed: The same one gives the same prompts.
        depth: 0 to 1: where the needle lies; anywhere by default.
        chat: Put the prompt into the tokenizer's chat template.
        **knobs: Of the task, such as `records=8`; of "data" its `file`, and `only` one of the tasks in it.

    Raises:
        ConfigError: If there is no such task, or it can't be made so.
    """
    for name, value, least in (("num_prompts", num_prompts, 1), ("length", length, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name}={value}: give a whole number >= {least}.")
    if depth is not None and not 0 <= depth <= 1:
        raise ConfigError(f"depth={depth}: give a number from 0 (beginning) to 1 (end).")
    writer = Writer(lab.encode, lab.chat_prompt if chat else None)
    if task == "data":
        if depth is not None or not {"file"} <= set(knobs) <= {"file", "only"}:
            raise ConfigError(
                "Task 'data' is data,file=FILE and, of a task in it, only=TASK; it has no more options."
            )
        check_options("Task 'data'", knobs, {"file": "", "only": ""})
        return read_samples(num_prompts, length, seed, writer, **knobs)
    if lab.name == "suite":
        if task in suite.TASKS:
            check_options(f"Task {task!r}", knobs, suite.TASKS[task].knobs)
        metric = _SUITE_METRICS.get(task, "whole_words")
        made = suite.make_samples(task, num_prompts, length, seed, depth=depth, **knobs)
        return [Sample(one.prompt, tuple(one.answers), one.max_new_tokens, metric) for one in made]
    if task not in ENGLISH:
        raise ConfigError(f"There is no task {task!r}. Tasks: {', '.join(ENGLISH)}, data.")
    if chat and task == "turns":  # questions that follow an answer are in no template's words
        raise ConfigError(f"Task {task!r} is asked in plain text: leave chat out.")
    check_options(f"Task {task!r}", knobs, ENGLISH[task].__kwdefaults__ or {})
    metric = _METRICS.get(task, "string_match_all")
    samples = []
    for index in range(num_prompts):

        def write(size: int, index: int = index) -> Draft:
            try:
                return ENGLISH[task](random.Random(f"{task} {seed} {index}"), size, depth, **knobs)
            except (ValueError, IndexError) as error:
                raise ConfigError(f"Task {task!r} can't be made with {knobs}: {error}.") from error

        samples.append(writer.sample(fit(task, length, write, writer), metric))
    return samples
