"""Rules of the dense trial (`benchmarks.real.candidates`): what could choose pairs, beside what is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specache_fx.runtime.session import SHARE_AFTER_HIT, SHARE_AFTER_MISS

Shares = Callable[[bool, float], float]
"""What lane 1's scores weigh beside lane 0's.

Of whether the last guess was wrong, and of the probability that lane 1 gave to the guess that it decodes now.
"""


@dataclass(frozen=True)
class Rule:
    """How pairs are chosen.

    Attributes:
        shares: See `Shares`.
        ngrams: The sequence's n-grams reseed lane 1 after a miss.
        refetch: After a miss one more pass, of the right token alone, chooses pairs and makes the guess.
        lanes: 1: no guess; 3: a second guess, the second likeliest token.
        decay: What the scores of the steps before weigh beside a step's own.
        same_step: All of it chosen by this step's own scores: the bound of any guess.
        cosine: A head whose query is less alike (cosine) to the one that chose for it chooses again in the same step.
        above: Pairs with more of a query's attention are read at 16 bits in the same step.
    """

    shares: Shares = lambda missed, sure: 1.0
    ngrams: bool = False
    refetch: bool = False
    lanes: int = 2
    decay: float = 0.0
    same_step: bool = False
    cosine: float | None = None
    above: float | None = None


def _shares(after_hit: float, after_miss: float) -> Shares:
    return lambda missed, sure: after_miss if missed else after_hit


# How both lanes' scores may be weighed; those of "recover" are in `RULES` by that name.
GRID = [(1.0, 0.4), (0.8, 0.0), (0.6, 0.4), (0.5, 0.5)]

_recover = _shares(SHARE_AFTER_HIT, SHARE_AFTER_MISS)
RULES = {
    "keep": Rule(),
    "query": Rule(_shares(0.0, 0.0), lanes=1),
    "refetch": Rule(refetch=True),
    "lane 0 after a miss": Rule(_shares(1.0, 0.0)),
    "lane 0 after a miss, n-grams": Rule(_shares(1.0, 0.0), ngrams=True),
    "both lanes by how sure the guess is": Rule(lambda missed, sure: sure),
    "both lanes by how sure the guess is, n-grams": Rule(lambda missed, sure: sure, ngrams=True),
    "both lanes": Rule(_recover),
    "both lanes, n-grams (recover)": Rule(_recover, ngrams=True),
    "recover and the steps before": Rule(_recover, ngrams=True, decay=0.5),
    "recover and a third lane": Rule(_recover, ngrams=True, lanes=3),
    "recover, heads that moved again (cosine 0.8)": Rule(_recover, ngrams=True, cosine=0.8),
    "recover, pairs above 1/64 exact": Rule(_recover, ngrams=True, above=1 / 64),
    "recover, pairs above 1/256 exact": Rule(_recover, ngrams=True, above=1 / 256),
    "none": Rule(same_step=True, lanes=1),
    **{
        f"n-grams, shares {after_hit} and {after_miss}": Rule(_shares(after_hit, after_miss), ngrams=True)
        for after_hit, after_miss in GRID
    },
}
