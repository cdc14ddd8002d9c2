"""Tasks: `make_samples` gives prompts with their answers, each built for a model or read from a data set.

A synthetic task is one function in `english.py` and one line in its table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from specache_bench.lab import Lab
from specache_bench.tasks.building import Sample, Writer, fit
from specache_bench.tasks.data_set import read_samples
from specache_bench.tasks.english import ENGLISH
from specache_bench.tasks.own import suite_samples
from specache_fx.errors import ConfigError

__all__ = ["TASKS", "Sample", "make_samples"]

DATA_SET = "data"
TASKS: tuple[str, ...] = (*ENGLISH, DATA_SET)


def make_samples(
    task: str,
    lab: Lab,
    *,
    num_prompts: int,
    length: int,
    seed: int = 0,
    depth: float | None = None,
    data: str | None = None,
    chat: bool = False,
    **knobs: Any,
) -> list[Sample]:
    """Prompts of a task for a model.

    Args:
        task: In `TASKS`; "data" reads `data`.
        lab: The model; "suite" is asked in its own words.
        num_prompts: How many; of a data set the first ones in an order drawn by the seed.
        length: Tokens of prompt and answer together; of the prompt alone for the suite model. A data set's prompts are
            left out where they are longer.
        seed: The same one gives the same prompts.
        depth: 0 to 1: where the needle lies; anywhere by default.
        data: A parquet or CSV file with kvpress' columns.
        chat: Put the prompt into the tokenizer's chat template.
        **knobs: Of a synthetic task, such as `records=8`; of a data set `only=NAME`, one of its tasks.

    Raises:
        ConfigError: If there is no such task, or it can't be made so.
    """
    if task not in TASKS and lab.name != "suite":
        raise ConfigError(f"There is no task {task!r}. Tasks: {', '.join(TASKS)}.")
    for name, value, least in (("num_prompts", num_prompts, 1), ("length", length, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name}={value}: give a whole number >= {least}.")
    if depth is not None and not 0 <= depth <= 1:
        raise ConfigError(f"depth={depth}: give a number from 0 (beginning) to 1 (end).")
    writer = Writer(lab.encode, _chat(lab) if chat else None)
    if task == DATA_SET:
        if data is None or depth is not None:
            raise ConfigError('Task "data" needs --data FILE, with kvpress\' columns, and takes no depth.')
        return read_samples(data, num_prompts, length, seed, writer, **knobs)
    if data is not None:
        raise ConfigError(f"Task {task!r} is built, not read: leave --data out.")
    if lab.name == "suite":
        return suite_samples(task, num_prompts, length, seed, depth, **knobs)
    if chat and task == "turns":  # questions that follow an answer are in no template's words
        raise ConfigError(f"Task {task!r} is asked in plain text: leave --chat out.")
    return [_english(task, index, length, seed, depth, writer, knobs) for index in range(num_prompts)]


def _english(
    task: str, index: int, length: int, seed: int, depth: float | None, writer: Writer, knobs: dict[str, Any]
) -> Sample:
    def write(size: int) -> Any:
        try:
            return ENGLISH[task](random.Random(f"{task} {seed} {index}"), size, depth, **knobs)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"Task {task!r} can't be made with {knobs}: {error}.") from error

    draft = fit(task, length, write, writer)
    metric = {"copying": "copying", "table": "fields"}.get(task, "string_match_all")
    return Sample(writer.prompt(draft), draft.answers, draft.max_new_tokens, metric, turns=draft.turns)


def _chat(lab: Lab) -> Callable[[str], str]:
    tokenizer = lab.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"The tokenizer of {lab.name!r} has no chat template: leave --chat out, or give an instruction model."
        )
    return lambda text: str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    )
