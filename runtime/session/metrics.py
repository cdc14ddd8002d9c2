"""Counters of a session's decode steps, without a host sync on the way."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specache_fx._log import warn_once
from specache_fx.runtime.native import cuda_streams
from specache_fx.runtime.select import count_overlap

logger = logging.getLogger(__name__)

_BLOCK_STEPS = 256
_HINT_STEPS, _HINT_RATE = 64, 0.1


class Hits(NamedTuple):
    """Counts of right guesses in some steps: sums over batch rows, kv heads, layers and steps.

    Attributes:
        token_hits: Batch rows whose token was the one that had been speculated.
        token_checks: Batch rows where one had been.
        topk_hits: Pairs of the output token's own top-k that were staged for it.
        topk_needed: Pairs of its own top-k.
        mass: Its selection scores on staged pairs.
        best_mass: Its selection scores on its own top-k, the most that `top_k` pairs can have.
    """

    token_hits: float = 0
    token_checks: float = 0
    topk_hits: float = 0
    topk_needed: float = 0
    mass: float = 0
    best_mass: float = 0

    def plus(self, other: Hits) -> Hits:
        """Both together."""
        return Hits(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def exact_rate(self) -> float | None:
        """Share of speculative tokens that were right; None where there was none."""
        return _rate(self.token_hits, self.token_checks)

    @property
    def topk_rate(self) -> float | None:
        """Share of the needed pairs that were staged; None where it was not measured."""
        return _rate(self.topk_hits, self.topk_needed)

    @property
    def attention_rate(self) -> float | None:
        """Attention on staged pairs, over the most that there could be; None where it was not measured."""
        return _rate(self.mass, self.best_mass)


@dataclass(frozen=True)
class SplitHits:
    """The same steps, split by whether the speculative token was right; a step without one is in the whole alone.

    Attributes:
        all: Of all batch rows.
        right: Of the batch rows whose token was the one speculated.
        wrong: Of those whose token was another.
        longest_miss_run: The most steps in a row in which one batch row's token was another, of those with a guess.
    """

    all: Hits
    right: Hits
    wrong: Hits
    longest_miss_run: int

    def plus(self, other: SplitHits) -> SplitHits:
        """Both together."""
        return SplitHits(
            self.all.plus(other.all),
            self.right.plus(other.right),
            self.wrong.plus(other.wrong),
            max(self.longest_miss_run, other.longest_miss_run),
        )


def _rate(part: float, whole: float) -> float | None:
    # Both masses are rounded sums.
    return min(part / whole, 1.0) if whole else None


@dataclass(frozen=True)
class Step:
    """One decode step of the series.

    Attributes:
        kv_len: Tokens in the cache after it.
        refetched: Its pairs were chosen anew (`on_miss="refetch"`).
        hits: Its counts.
    """

    kv_len: int
    refetched: bool
    hits: Hits


@dataclass
class _Counts:
    """The counts of one step; None where nothing was there to count.

    Attributes:
        missed: bool `[batch]`.
        topk: float64 `[batch, 4]`, the last four of `Hits`.
    """

    missed: torch.Tensor | None = None
    topk: torch.Tensor | None = None

    @property
    def batch(self) -> int | None:
        """Rows that were counted."""
        counted = self.missed if self.topk is None else self.topk
        return None if counted is None else len(counted)


class Metrics:
    """Counters of one session. A step counts when it is through: once, if it failed midway and was repeated.

    Args:
        device: Where the session lives; the counters stay there until they are read.
        keep_steps: Keep them for each step as well.

    Attributes:
        steps: Decode steps.
        refetched_steps: Those whose pairs were chosen anew, because the speculative token was wrong.
        accepted_steps: Those that the step before had computed (`NextAnswer`).
    """

    def __init__(self, device: torch.device, *, keep_steps: bool = False) -> None:
        self.steps = self.refetched_steps = self.accepted_steps = 0
        self._keep_steps = keep_steps
        with torch.inference_mode(False):
            # float64 in the order of `Hits`, of all rows, of those guessed right, and wrong: whole numbers stay exact.
            self._total = torch.zeros(3, len(Hits._fields), dtype=torch.float64, device=device)
            self._longest = torch.zeros((), dtype=torch.int64, device=device)
            self._run = self._longest.new_zeros(0)  # misses in a row up to now, int64 `[batch]`
        # The series: `kv_len` and `refetched` by step, and rows of counters by block.
        self._told: list[tuple[int, bool]] = []
        self._blocks: list[torch.Tensor] = []
        # Steps that are through, not yet in the total: a step has no time for sums of so few numbers.
        self._recent: list[_Counts] = []
        # CUDA: only the reader waits for the counts of pairs.
        self._stream = cuda_streams.lend(self, device) if device.type == "cuda" else None
        self.begin_step()

    def begin_step(self) -> None:
        """Start to count a step, and forget the counts of one that broke off."""
        self._step = _Counts()
        self._refetched = self._accepted = False

    def count_token(self, missed: torch.Tensor) -> None:
        """Count the batch rows, bool `[batch]`, whose token was not the one speculated (exact hit rate). It is kept."""
        self._step.missed = missed

    def count_accepted(self, batch: int) -> None:
        """Count a step that was computed before, for so many rows: all are right."""
        self._accepted = True
        self.count_token(torch.zeros(batch, dtype=torch.bool, device=self._total.device))

    def count_refetch(self) -> None:
        """Note that the step's pairs were chosen anew."""
        self._refetched = True

    def count_topk(self, scores: torch.Tensor, top_k: int, staged: torch.Tensor) -> None:
        """Compare the pairs that a layer had staged for the step with the output token's own choice.

        Args:
            scores: float32 `[batch, num_kv_heads, num_quantized]`, lane 0's in this step, staged pairs in place.
            top_k: How many it would choose.
            staged: int32 `[batch, num_kv_heads, top_k]`, -1 fills.
        """
        counts = self.step_counts(len(scores))
        if self._stream is None:
            count_overlap(scores, top_k, staged, counts)
            return
        self._stream.wait_stream(torch.cuda.current_stream(scores.device))
        with torch.cuda.stream(self._stream):
            count_overlap(scores, top_k, staged, counts)
        for read in (scores, staged, counts):
            read.record_stream(self._stream)

    def _join(self) -> None:
        """Order later work on the current stream behind the counting."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def step_counts(self, batch: int) -> torch.Tensor:
        """The last four of the step's `Hits` so far, float64 `[batch, 4]`, to be added to (`select.count_overlap`)."""
        if self._step.topk is None:
            self._step.topk = torch.zeros(batch, 4, dtype=torch.float64, device=self._total.device)
        return self._step.topk

    def end_step(self, kv_len: int) -> None:
        """Count the step: it is through, and the cache holds `kv_len` tokens."""
        self.steps += 1
        self.refetched_steps += self._refetched
        self.accepted_steps += self._accepted
        if self._recent and self._step.batch not in (None, self._recent[-1].batch):
            self._fold()  # what is summed together is of one batch size
        self._recent.append(self._step)
        if self._keep_steps:
            self._told.append((kv_len, self._refetched))
        if len(self._recent) == _BLOCK_STEPS:
            self._fold()
        # Elsewhere the host would wait for the device: `stats()` does.
        if self.steps == _HINT_STEPS and self._total.device.type == "cpu":
            self.split()
        self.begin_step()

    def _fold(self) -> None:
        """Bring the newest steps into the total."""
        self._total, self._longest, self._run = self._sum()
        if self._keep_steps:
            self._blocks.append(self._rows().sum(1))
        self._recent = []

    def _sum(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The total, the longest run of misses and the runs up to now, with the newest steps."""
        total, longest, run = self._total, self._longest, self._run
        if self._recent:
            rows = self._rows()
            right, checked = rows[..., :1], rows[..., 1:2]
            parts = rows, rows * right, rows * (checked - right)
            total = total + torch.stack([part.sum((0, 1)) for part in parts])
        guessed = [step.missed for step in self._recent if step.missed is not None]
        if not guessed:
            return total, longest, run
        missed = torch.stack(guessed)  # [steps, batch]
        steps = torch.arange(1, len(missed) + 1, device=missed.device)[:, None]
        last_hit = torch.where(missed, 0, steps).cummax(dim=0).values
        before = run if run.shape == missed.shape[1:] else torch.zeros_like(missed[0], dtype=torch.int64)
        runs = steps - last_hit + torch.where(last_hit == 0, before, 0)
        return total, torch.maximum(longest, runs.max()), runs[-1]

    def _rows(self) -> torch.Tensor:
        """The newest steps' counts in the order of `Hits`, float64 `[steps, batch, 6]`; there are some."""
        self._join()
        batch = next((step.batch for step in self._recent if step.batch is not None), 0)
        none, no_pairs = self._total.new_zeros(batch, dtype=torch.bool), self._total.new_zeros(batch, 4)
        missed = torch.stack([none if step.missed is None else step.missed for step in self._recent])
        checked = torch.stack([none if step.missed is None else ~none for step in self._recent])
        pairs = torch.stack([no_pairs if step.topk is None else step.topk for step in self._recent])
        return torch.cat([torch.stack([checked & ~missed, checked], -1), pairs], -1)

    @property
    def hits(self) -> Hits:
        """Of all steps; waits for the device."""
        return self.split().all

    def split(self) -> SplitHits:
        """Of all steps, and of those guessed right and wrong; waits for the device. Logs a hint if few are right."""
        with torch.inference_mode(False), torch.no_grad():
            total, longest, _ = self._sum()
            every, right, wrong = (Hits(*row) for row in total.tolist())
            found = SplitHits(every, right, wrong, int(longest))
        rate = found.all.exact_rate
        if self.steps >= _HINT_STEPS and rate is not None and rate < _HINT_RATE:
            warn_once(
                logger,
                f"Fewer than {_HINT_RATE:.0%} of the speculative tokens are right after {_HINT_STEPS} decode steps, so"
                " pairs are prefetched for tokens that don't come. on_miss='recover', the default, loses less than"
                " 'keep', and a larger top_k less again; on_miss='refetch' fetches the right pairs, in one more"
                " forward pass after each miss. specache_fx.stats(cache) has the rates.",
            )
        return found

    def series(self) -> list[Step]:
        """Each step in the order in which they ran, where they are kept; waits for the device."""
        if not self._told:
            return []
        with torch.inference_mode(False), torch.no_grad():
            newest = [self._rows().sum(1)] if self._recent else []
            rows = torch.cat([*self._blocks, *newest]).tolist()
        return [Step(*told, Hits(*row)) for told, row in zip(self._told, rows, strict=True)]
