"""A method on a text: what it makes of the text's own tokens, and how it goes on by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from specache_fx.errors import ConfigError
from specache_fx.eval.decode import Sampling
from specache_fx.eval.methods import Generated, Running
from specache_fx.eval.outcome import ContinuationOutcome, TextOutcome, summed_up
from specache_fx.eval.reference import Reference

Progress = Callable[[int], None] | None


def decode_text(
    running: Running, windows: torch.Tensor, decoded: int, batch_size: int, progress: Progress
) -> TextOutcome:
    """Feed the last `decoded` tokens of each window; see `Bench.perplexity`."""
    began = time.perf_counter()
    results: list[tuple[int, Generated]] = []
    for batch in windows.split(batch_size):
        results.append((len(batch), running.score(batch[:, : -decoded - 1], batch[:, -decoded - 1 :])))
        if progress is not None:
            progress(len(batch))
    losses = torch.cat([result.losses for _, result in results if result.losses is not None])
    beside = [result.against_full for _, result in results if result.against_full is not None]
    return TextOutcome(
        losses=tuple(losses.double().mean(dim=1).tolist()),
        tokens=losses.numel(),
        loss_at=_rounded(losses),
        kl_at=_rounded(torch.cat([each.kl for each in beside])) if beside else None,
        same_top_at=torch.cat([each.same_top for each in beside]).int().tolist() if beside else None,
        seconds=time.perf_counter() - began,
        **summed_up(results),
    )


def continue_text(
    running: Running,
    reference: Reference,
    windows: torch.Tensor,
    new_tokens: int,
    sampling: Sampling | None,
    batch_size: int,
    progress: Progress,
) -> ContinuationOutcome:
    """Go on behind each window, and compare with how the full cache goes on; see `Bench.continuation`."""
    began = time.perf_counter()
    results: list[tuple[int, Generated]] = []
    same, losses = [], []
    for number, batch in enumerate(windows.split(batch_size)):
        own = sampling and sampling.of_batch(number)
        result = running.generate(batch, new_tokens, frozenset(), None, own)
        said = torch.tensor(result.ids)
        same.append(said == reference.continuation(batch, new_tokens, own))
        losses.append(reference.losses(batch, said))
        results.append((len(batch), result))
        if progress is not None:
            progress(len(batch))
    equal = torch.cat(same)
    return ContinuationOutcome(
        ids=tuple(tuple(row) for _, result in results for row in result.ids),
        agreement=tuple(equal.double().mean(dim=1).tolist()),
        until_difference=tuple(equal.cumprod(dim=1).double().mean(dim=1).tolist()),
        losses=tuple(torch.cat(losses).double().mean(dim=1).tolist()),
        seconds=time.perf_counter() - began,
        **summed_up(results),
    )


def check_new_tokens(new_tokens: int, sampling: Sampling | None) -> None:
    """Refuse what can't be generated.

    Raises:
        ConfigError: If there are no tokens, or the temperature is not above 0.
    """
    if new_tokens < 1:
        raise ConfigError(f"new_tokens={new_tokens}: give a whole number >= 1.")
    if sampling is not None and not sampling.temperature > 0:
        raise ConfigError(
            f"temperature={sampling.temperature}: give a number above 0; leave it out for greedy."
        )


def _rounded(values: torch.Tensor) -> Any:
    """As lists for JSON, to six digits after the point."""
    return [[round(value, 6) for value in row] for row in values.tolist()]
