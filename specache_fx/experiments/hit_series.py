"""The hit rates of each decode step, along the output. Paper: the reviews of SpeCache and the authors' answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

import specache_fx
from specache_fx.compiled import uncompile
from specache_fx.eval.bench import Bench
from specache_fx.eval.sample import Sample

RATES = ("exact_hit_rate", "topk_hit_rate", "attention_hit_rate")


def probe(bench: Bench, samples: list[Sample], options: Mapping[str, Any]) -> dict[str, Any]:
    """Generate with SpeCache, one prompt at a time, so that a step of the series is a step of one output.

    Args:
        bench: Whose model runs no method.
        samples: Prompts.
        options: Of `SpecacheConfig`.

    Returns:
        `series`: for each prompt and rate of `RATES` a list by step, None where a step has none; `changes`: for each
        prompt the steps that feed the first word of a new topic; and each rate over all steps.
    """
    series: list[dict[str, list[float | None]]] = []
    changes: list[list[int]] = []
    specache_fx.compile(bench.model, lowering="eager", track_hit_rates="steps", **options)
    try:
        for sample in samples:
            ids = torch.tensor([bench.encode(sample.prompt)], device=bench.model.device)
            out = bench.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sample.max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
            )
            steps = specache_fx.stats(out.past_key_values).hit_series
            series.append({rate: [getattr(step, rate) for step in steps] for rate in RATES})
            words = [bench.tokenizer.decode([token]) for token in out.sequences[0, ids.shape[1] :].tolist()]
            changes.append(topic_changes(words, sample.answers))
    finally:
        uncompile(bench.model)
    overall = {rate: mean([value for one in series for value in one[rate]]) for rate in RATES}
    return {"series": series, "changes": changes, **overall}


def mean(values: Sequence[float | None]) -> float | None:
    """Of the values that are there; None where there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def topic_changes(words: Sequence[str], answers: Sequence[str]) -> list[int]:
    """The steps of an output at which it goes on to another topic.

    Args:
        words: The output by token.
        answers: What was to be said, in order.

    Returns:
        Indices of the first word of each new topic: where the suite's steps of a plan ("q2 [ key ...") go on to
        another kind of question, else where the middle one of several answers begins.
    """
    names = [word.strip() for word in words]
    kinds = [(at, kind) for at, (name, kind) in enumerate(pairwise(names)) if re.fullmatch(r"q\d", name)]
    if kinds:
        return [at for (_, before), (at, kind) in pairwise(kinds) if kind != before]
    if len(answers) < 2:
        return []
    wanted = "".join(answers[len(answers) // 2].split())
    text, begins = "", []
    for name in names:
        begins.append(len(text))
        text += "".join(name.split())
    found = text.find(wanted)
    return [max(at for at, begin in enumerate(begins) if begin <= found)] if found >= 0 else []
