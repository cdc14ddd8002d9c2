"""How long guesses stay wrong where the sequence itself says what follows."""

from __future__ import annotations

from typing import Any

import torch

import specache_fx
from specache_fx.compiled import uncompile
from specache_fx.eval.bench import Bench
from specache_fx.runtime.token_history import TokenHistory


@torch.inference_mode()
def follow(bench: Bench, windows: torch.Tensor, decoded: int, **options: Any) -> dict[str, Any]:
    """Feed the last tokens of each window, one window at a time, and compare each guess with the n-gram's.

    Args:
        bench: Whose model runs no method.
        windows: Token ids, int64 `[num_windows, length]`.
        decoded: Tokens of each that are fed step by step.
        options: Of `SpecacheConfig`.

    Returns:
        For each window: whether each step's guess was right (`hits`), and whether the n-gram before it said so
        (`ngrams`: None where the newest tokens stood nowhere before); `longest_run`, of misses, and
        `longest_run_with_ngram`: of misses at which the n-gram was right.
    """
    found: dict[str, Any] = {"hits": [], "ngrams": []}
    specache_fx.compile(bench.model, lowering="eager", track_hit_rates="steps", **options)
    try:
        for window in windows:
            ids = window[None].to(bench.model.device)
            prompt, rest = ids[:, :-decoded], ids[:, -decoded:]
            out = bench.model(prompt, use_cache=True, logits_to_keep=1)
            for token in rest.T:
                out = bench.model(token[:, None], past_key_values=out.past_key_values, use_cache=True)
            series = specache_fx.stats(out.past_key_values).hit_series
            found["hits"].append([step.exact_hit_rate == 1.0 for step in series[1:]])
            found["ngrams"].append(_ngrams(window, decoded)[1:])
    finally:
        uncompile(bench.model)
    pairs = list(zip(found["hits"], found["ngrams"], strict=True))
    found["longest_run"] = max(_longest([not hit for hit in hits]) for hits, _ in pairs)
    found["longest_run_with_ngram"] = max(
        _longest([not hit and bool(known) for hit, known in zip(hits, ngrams, strict=True)])
        for hits, ngrams in pairs
    )
    return found


def _ngrams(window: torch.Tensor, decoded: int) -> list[bool | None]:
    """For each decoded token whether what followed its n-gram before is it."""
    history = TokenHistory(torch.device("cpu"))
    start = len(window) - decoded
    history.append(window[None, :start], 0)
    said: list[bool | None] = []
    for place in range(start, len(window)):
        following, known = history.following()
        said.append(bool(following == window[place]) if known else None)
        history.append(window[None, place : place + 1], place)
    return said


def _longest(missed: list[bool]) -> int:
    longest = run = 0
    for miss in missed:
        run = run + 1 if miss else 0
        longest = max(longest, run)
    return longest
