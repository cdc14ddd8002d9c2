"""The tasks of the suite model, in its own words: one word is one token there."""

from __future__ import annotations

from typing import Any

from specache_bench.tasks.building import Sample
from specache_fx.examples.suite import make_samples


def suite_samples(
    task: str, num_prompts: int, length: int, seed: int, depth: float | None, **knobs: Any
) -> list[Sample]:
    """See `specache_fx.examples.suite.tasks`."""
    metric = "words_in_place" if task == "copying" else "whole_words"
    made = make_samples(task, num_prompts, length, seed, depth=depth, **knobs)
    return [Sample(one.prompt, tuple(one.answers), one.max_new_tokens, metric) for one in made]
