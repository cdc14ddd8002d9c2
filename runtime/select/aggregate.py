"""One score of several that choose the same pairs: `SpecacheConfig.aggregation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Aggregation:
    """A way of making one score of several; all of them are softmax probabilities of one token.

    Attributes:
        of_heads: Scores and a dimension, the query heads that share a cached row (a group of a kv head; all heads of
            latent attention), to scores without that dimension. Takes no padding marks.
        of_attentions: The scores of two attentions that read the same cache, to one of both. Where a token is padding,
            below 0 in both, the result is below 0.
    """

    of_heads: Callable[[torch.Tensor, int], torch.Tensor]
    of_attentions: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


AGGREGATIONS: dict[str, Aggregation] = {
    "mean": Aggregation(torch.mean, torch.add),
    "max": Aggregation(torch.amax, torch.maximum),
}
