"""What a session counts of its decode steps, without a host sync on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specache_fx.runtime.select import count_overlap

_BLOCK_STEPS = 256


class Hits(NamedTuple):
    """How well the pairs of some steps were guessed: sums over batch rows, kv heads, layers and steps.

    Attributes:
        token_hits: Batch rows whose token was the one that had been speculated.
        token_checks: Batch rows where one had been.
        topk_hits: Pairs of the output token's own top-k that were staged for it.
        topk_needed: Pairs of its own top-k.
        mass: Its selection scores on what was staged for it.
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
        """Attention on what was staged, of the most that there could be; None where it was not measured."""
        return _rate(self.mass, self.best_mass)


def _rate(part: float, whole: float) -> float | None:
    # Both masses are rounded sums.
    return min(part / whole, 1.0) if whole else None


@dataclass(frozen=True)
class Step:
    """One decode step of the series.

    Attributes:
        kv_len: Tokens in the cache after it.
        refetched: Its pairs were chosen anew (`on_miss="refetch"`).
        hits: What was counted in it.
    """

    kv_len: int
    refetched: bool
    hits: Hits


class Metrics:
    """Counters of one session. A step counts when it is through: once, if it failed midway and was repeated.

    Args:
        device: Where the session lives; the counters stay there until they are read.
        keep_steps: Keep them for each step as well.

    Attributes:
        steps: Decode steps.
        refetched_steps: Those whose pairs were chosen anew, because the speculative token was wrong.
    """

    def __init__(self, device: torch.device, *, keep_steps: bool = False) -> None:
        self.steps = self.refetched_steps = 0
        self._keep_steps = keep_steps
        with torch.inference_mode(False):
            # float64 in the order of `Hits`: sums of whole numbers stay exact.
            self._total = torch.zeros(len(Hits._fields), dtype=torch.float64, device=device)
        # The series: `kv_len` and `refetched` by step, and rows of counters; old ones are joined, since a device gives
        # each tensor far more memory than six numbers take.
        self._told: list[tuple[int, bool]] = []
        self._blocks: list[torch.Tensor] = []
        self._recent: list[torch.Tensor] = []
        # Of steps that are through, not yet in the total: a step has no time for sums of so few numbers.
        self._missed: list[torch.Tensor] = []
        self._topks: list[torch.Tensor] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Start to count a step, and forget what one counted that broke off."""
        self._step_missed: torch.Tensor | None = None
        self._step_topk: torch.Tensor | None = None  # float64, the last four of `Hits`
        self._refetched = False

    def count_token(self, missed: torch.Tensor) -> None:
        """Count the batch rows, bool `[batch]`, whose token was not the one speculated (exact hit rate). It is kept."""
        self._step_missed = missed

    def count_refetch(self) -> None:
        """Note that the step's pairs were chosen anew."""
        self._refetched = True

    def count_topk(self, scores: torch.Tensor, top_k: int, staged: torch.Tensor) -> None:
        """Compare what a layer had staged for the step with what the output token itself would have chosen.

        Args:
            scores: float32 `[batch, num_kv_heads, num_quantized]`, lane 0's in this step, staged pairs in place.
            top_k: How many it would choose.
            staged: int32 `[batch, num_kv_heads, top_k]`, -1 fills.
        """
        count_overlap(scores, top_k, staged, self.step_counts())

    def step_counts(self) -> torch.Tensor:
        """The last four of the step's `Hits` so far, float64 `[4]`, to be added to (`select.count_overlap`)."""
        if self._step_topk is None:
            self._step_topk = torch.zeros(4, dtype=torch.float64, device=self._total.device)
        return self._step_topk

    def end_step(self, kv_len: int) -> None:
        """Count the step: it is through, and the cache holds `kv_len` tokens."""
        self.steps += 1
        self.refetched_steps += self._refetched
        if self._keep_steps:
            missed = [] if self._step_missed is None else [self._step_missed]
            row = torch.cat([self._tokens(missed), self.step_counts()])
            self._total = self._total + row
            self._told.append((kv_len, self._refetched))
            self._recent.append(row)
            if len(self._recent) == _BLOCK_STEPS:
                self._blocks.append(torch.stack(self._recent))
                self._recent = []
        else:
            if self._step_missed is not None:
                self._missed.append(self._step_missed)
            if self._step_topk is not None:
                self._topks.append(self._step_topk)
            if _BLOCK_STEPS in (len(self._missed), len(self._topks)):
                self._total, self._missed, self._topks = self._sum(), [], []
        self.begin_step()

    def _tokens(self, missed: list[torch.Tensor]) -> torch.Tensor:
        """The first two of `Hits`, float64 `[2]`."""
        if not missed:
            return self._total.new_zeros(2)
        rows = torch.cat(missed)
        return torch.stack([(~rows).sum(), torch.ones_like(rows).sum()]).to(torch.float64)

    def _sum(self) -> torch.Tensor:
        topks = torch.stack([self._total.new_zeros(4), *self._topks]).sum(0)
        return self._total + torch.cat([self._tokens(list(self._missed)), topks])

    @property
    def hits(self) -> Hits:
        """Of all steps; waits for the device."""
        with torch.inference_mode(False), torch.no_grad():
            return Hits(*self._sum().tolist())

    def series(self) -> list[Step]:
        """Each step in the order in which they ran, where they are kept; waits for the device."""
        recent = [torch.stack(self._recent)] if self._recent else []
        rows = torch.cat(self._blocks + recent).tolist() if self._told else []
        return [Step(*told, Hits(*row)) for told, row in zip(self._told, rows, strict=True)]
