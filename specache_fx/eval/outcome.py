"""What a method made of samples or of a text, and what it took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specache_fx.errors import ConfigError
from specache_fx.eval.methods import Generated


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a method took. Bytes are of one sequence, the mean over samples, at the end of generation.

    Attributes:
        device_bytes: On the model's device, counted on the tensors.
        full_bytes: Of the full cache at that length.
        host_bytes: Reserved on the host.
        seconds: Of the whole run: reading prompts that were not read before, and compiling, included.
        decode_ms: Median of a decode step of a batch; not a number where all steps were warm-up.
        stats: Means over samples of what the method knows of itself: exact_hit_rate, topk_hit_rate,
            prefetched_bytes, ...; None where it was not measured.
    """

    device_bytes: int
    full_bytes: int
    host_bytes: int
    seconds: float
    decode_ms: float
    stats: dict[str, float | None] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Device bytes to the full cache's: the paper's "KV Cache Size"."""
        return self.device_bytes / self.full_bytes


@dataclass(frozen=True, kw_only=True)
class Outcome(Measured):
    """What a method made of samples.

    Attributes:
        predictions: What was generated, one a sample, in their order; answers to turns are parted by line ends.
        scores: 0 to 1, one a sample; the mean over its turns.
        turn_scores: 0 to 1 for each turn, one row a sample; empty where there are none.
    """

    predictions: tuple[str, ...]
    scores: tuple[float, ...]
    turn_scores: tuple[tuple[float, ...], ...] = ()

    @property
    def score(self) -> float:
        """The mean."""
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True, kw_only=True)
class TextOutcome(Measured):
    """What a method made of a text.

    Attributes:
        losses: Mean negative log-likelihood of the decoded tokens, one a window.
        tokens: How many were decoded, of all windows.
        loss_at: The same of each token, by window.
        kl_at: KL(full || method) of the distribution that predicts each token, in nats, by window; None where another
            process has the logits.
        same_top_at: 1 where the likeliest token is the full cache's, else 0, by window; None as `kl_at`.
    """

    losses: tuple[float, ...]
    tokens: int
    loss_at: list[list[float]]
    kl_at: list[list[float]] | None
    same_top_at: list[list[int]] | None

    @property
    def perplexity(self) -> float:
        """Of the decoded tokens; windows weigh the same, for they have the same number of them."""
        return math.exp(sum(self.losses) / len(self.losses))

    @property
    def kl(self) -> float | None:
        """The mean over all tokens."""
        return _mean(self.kl_at)

    @property
    def same_top(self) -> float | None:
        """The share of tokens at which the likeliest one is the full cache's."""
        return _mean(self.same_top_at)


@dataclass(frozen=True, kw_only=True)
class ContinuationOutcome(Measured):
    """How a method goes on behind a text, beside the full cache.

    Attributes:
        ids: New tokens of each window.
        agreement: Share of the new tokens that are the full cache's at the same place, one a window.
        until_difference: Share of the new tokens before the first that differs, one a window.
        losses: Mean negative log-likelihood of the new tokens under the full cache, one a window.
    """

    ids: tuple[tuple[int, ...], ...]
    agreement: tuple[float, ...]
    until_difference: tuple[float, ...]
    losses: tuple[float, ...]


def _mean(rows: Sequence[Sequence[float]] | None) -> float | None:
    """Over all values of all rows."""
    return None if rows is None else sum(map(sum, rows)) / sum(map(len, rows))


def batches(kinds: Sequence[Any], batch_size: int) -> Iterator[list[int]]:
    """Rows of the same kind together, in order, at most `batch_size` at a time.

    Raises:
        ConfigError: If there are none.
    """
    if not kinds:
        raise ConfigError("There are no samples to run: ask for one prompt or more.")
    groups: dict[Any, list[int]] = {}
    for row, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(row)
    for rows in groups.values():
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]


def summed_up(results: Sequence[tuple[int, Generated]]) -> dict[str, Any]:
    """Means over sequences, from batches with their number of rows: what `Outcome` says but text and scores."""
    rows = sum(n for n, _ in results)
    steps = [ms for _, result in results for ms in result.step_ms]
    names = dict.fromkeys(name for _, result in results for name in result.footprint.stats)
    stats: dict[str, float | None] = {}
    for name in names:
        known = [(n, value) for n, r in results if (value := r.footprint.stats.get(name)) is not None]
        stats[name] = sum(n * value for n, value in known) / sum(n for n, _ in known) if known else None
    return {
        "device_bytes": round(sum(result.footprint.device_bytes for _, result in results) / rows),
        "full_bytes": round(sum(result.full_bytes for _, result in results) / rows),
        "host_bytes": round(sum(result.footprint.host_bytes for _, result in results) / rows),
        "decode_ms": median(steps) if steps else math.nan,
        "stats": stats,
    }
