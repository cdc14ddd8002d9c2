"""What the oracle reports of its decode steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from support.oracle_quant import Indices
from torch import Tensor


class HitCount(NamedTuple):
    """`hits` of `total`, positions or attention on them; the rate of nothing is None."""

    hits: float = 0
    total: float = 0

    def __add__(self, other: HitCount) -> HitCount:  # type: ignore[override]
        return HitCount(self.hits + other.hits, self.total + other.total)

    @property
    def rate(self) -> float | None:
        return self.hits / self.total if self.total else None


NOTHING = HitCount()


@dataclass(frozen=True)
class DecodeStep:
    """What one decode step did.

    Attributes:
        token: T_t, int64 [batch].
        logits: Lane 0's, [batch, vocab_size].
        lane1_token: T'_{t+1}, which went into lane 1, int64 [batch]; None where there is one lane.
        lane1_logits: [batch, vocab_size] or None.
        speculative: T'_{t+2}, the argmax of lane 1, for the next step's lane 1; None where there is one lane.
        staged: K_t of each layer: what this step attended to at 16 bits.
        selected: K_{t+1} of each layer; as `staged` for lookahead "none", empty for policy "kivi".
        scores: What `selected` went by, of each layer, float32 [batch, num_kv_heads, num_quantized].
        predecoded: Whether Algorithm 2 ran before this step.
        exact_hits: Rows whose `token` is what the step before had speculated for this position.
        topk_hits: |K_t and top-k of lane 0's own scores at this step| of |the latter|, over all layers, rows
            and heads.
        mass: Lane 0's own scores on K_t, of those on their top-k, over all layers, rows and heads.
        refetched: Rows that missed, for which Algorithm 2 ran again: bool [batch]; None where it did not run.
        accepted: Whether lane 1 of the step before had computed it (`accept_guesses`).
    """

    token: Tensor
    logits: Tensor
    lane1_token: Tensor | None = None
    lane1_logits: Tensor | None = None
    speculative: Tensor | None = None
    staged: list[Indices] = field(default_factory=list)
    selected: list[Indices] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    predecoded: bool = False
    exact_hits: HitCount = NOTHING
    topk_hits: HitCount = NOTHING
    mass: HitCount = NOTHING
    refetched: Tensor | None = None
    accepted: bool = False


@dataclass(frozen=True)
class OracleRun:
    """A generation: prefill logits [batch, q_len, vocab_size]; the rest as `models.generate` has it."""

    prefill_logits: Tensor
    tokens: Tensor
    logits: Tensor
    steps: list[DecodeStep]

    @property
    def exact_hits(self) -> HitCount:
        return sum((step.exact_hits for step in self.steps), start=NOTHING)

    @property
    def topk_hits(self) -> HitCount:
        return sum((step.topk_hits for step in self.steps), start=NOTHING)

    @property
    def mass(self) -> HitCount:
        return sum((step.mass for step in self.steps), start=NOTHING)


def overlap(guessed: Indices, wanted: Indices) -> HitCount:
    """How many of the wanted positions were guessed, over all batch rows and kv heads."""
    count = NOTHING
    for guessed_row, wanted_row in zip(guessed, wanted, strict=True):
        for guessed_head, wanted_head in zip(guessed_row, wanted_row, strict=True):
            count += HitCount(len(set(guessed_head) & set(wanted_head)), len(wanted_head))
    return count


def mass_of(positions: Indices, scores: Tensor) -> float:
    """The scores, [batch, num_kv_heads, tokens], of some positions, summed."""
    return sum(
        scores[row, head, position].item()
        for row, heads in enumerate(positions)
        for head, chosen in enumerate(heads)
        for position in chosen
    )
