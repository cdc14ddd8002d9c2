"""Tasks: what is asked, in which words, and how the answers are scored.

    make_samples("multikey", bench, num_prompts=8, length=4096, seed=0, depth=0.5)
    make_samples("longbench/qasper", bench, num_prompts=8, length=8000, seed=0, data="LongBench/data")

A synthetic task is one function in `english.py` and one line in its table; a data set is one line in `ruler.py` or
`longbench.json`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError
from specache_fx.eval.sample import Sample
from specache_fx.eval.subject import Subject
from specache_fx.eval.tasks import longbench, ruler
from specache_fx.eval.tasks.building import Writer, fit
from specache_fx.eval.tasks.english import ENGLISH
from specache_fx.eval.tasks.own import needle_samples, suite_samples

__all__ = ["TASKS", "make_samples"]

# What is asked lies everywhere, or in both halves.
_NO_DEPTH = ("frequent", "topics")
# Questions that follow an answer are in no template's words.
_NO_CHAT = ("turns",)

TASKS: tuple[str, ...] = (*ENGLISH, *ruler.NAMES, *longbench.NAMES)


def make_samples(
    task: str,
    subject: Subject,
    *,
    num_prompts: int,
    length: int,
    seed: int = 0,
    depth: float | None = None,
    data: str | Path | None = None,
    chat: bool = False,
    **knobs: Any,
) -> list[Sample]:
    """Prompts of a task for a model.

    Args:
        task: In `TASKS`.
        subject: The model's bench; "needle" and "suite" are asked in their own words.
        num_prompts: How many; of a data set the first ones in an order drawn by the seed.
        length: Tokens of prompt and answer together; of the prompt alone for the suite model, and for "longbench/..."
            those that it is cut to.
        seed: The same one gives the same prompts.
        depth: 0 to 1: where the needle lies; anywhere by default.
        data: For "ruler/..." and "longbench/...": the folder of the data set, or its name on the hub.
        chat: Put the prompt into the tokenizer's chat template.
        **knobs: Of a synthetic task, such as `records=8`.

    Raises:
        ConfigError: If there is no such task, or it can't be made so.
    """
    if task not in TASKS:
        raise ConfigError(f"There is no task {task!r}. Tasks: {', '.join(TASKS)}.")
    for name, value, least in (("num_prompts", num_prompts, 1), ("length", length, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name}={value}: give a whole number >= {least}.")
    if depth is not None and not 0 <= depth <= 1:
        raise ConfigError(f"depth={depth}: give a number from 0 (beginning) to 1 (end).")
    writer = Writer(subject.encode, _chat(subject) if chat else None)
    family = task.partition("/")[0]
    if family in _DATA_SETS:
        if data is None:
            raise ConfigError(f"Task {task!r} needs its data: give --data a folder, or a name on the hub.")
        if depth is not None or knobs:
            raise ConfigError(
                f"Task {task!r} is a data set: it takes neither a depth nor {list(knobs) or 'knobs'}."
            )
        return _DATA_SETS[family](task, data, num_prompts, length, seed, writer, subject.tokenizer)
    if data is not None:
        raise ConfigError(f"Task {task!r} is built, not read: leave --data out.")
    if subject.name in _OWN:
        if chat:
            raise ConfigError(f"The model {subject.name!r} has no chat template: leave --chat out.")
        return _OWN[subject.name](task, num_prompts, length, seed, depth, **knobs)
    if depth is not None and task in _NO_DEPTH:
        raise ConfigError(f"Task {task!r} has no depth: leave it out.")
    if chat and task in _NO_CHAT:
        raise ConfigError(f"Task {task!r} is asked in plain text: leave --chat out.")
    return [_english(task, index, length, seed, depth, writer, knobs) for index in range(num_prompts)]


def _english(
    task: str,
    index: int,
    length: int,
    seed: int,
    depth: float | None,
    writer: Writer,
    knobs: dict[str, Any],
) -> Sample:
    def write(size: int) -> Any:
        try:
            return ENGLISH[task](random.Random(f"{task} {seed} {index}"), size, depth, **knobs)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"Task {task!r} can't be made with {knobs}: {error}.") from error

    draft = fit(task, length, write, writer)
    return Sample(
        writer.prompt(draft), draft.answers, draft.max_new_tokens, task, length, depth, turns=draft.turns
    )


def _chat(subject: Subject) -> Callable[[str], str]:
    tokenizer = subject.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"The tokenizer of {subject.name!r} has no chat template: leave --chat out, or give an instruction model."
        )
    return lambda text: str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    )


_DATA_SETS: dict[str, Callable[..., list[Sample]]] = {"ruler": ruler.load, "longbench": longbench.load}
_OWN: dict[str, Callable[..., list[Sample]]] = {"needle": needle_samples, "suite": suite_samples}
