"""Selectors: which KV pairs to prefetch, given scores. Each is a file and a line in `SELECTORS`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.runtime.select.aggregate import AGGREGATIONS
from specache_fx.runtime.select.topk import count_overlap, select_topk, topk_overlap

__all__ = [
    "AGGREGATIONS",
    "SELECTORS",
    "count_overlap",
    "make_selector",
    "select_topk",
    "topk_overlap",
]

Selector = Callable[[torch.Tensor, int], torch.Tensor]
"""float32 scores `[batch, num_kv_heads, tokens]`, top_k -> int32 `[batch, num_kv_heads, top_k]`."""

SELECTORS: dict[str, Selector] = {"topk": select_topk}


def make_selector(config: SpecacheConfig) -> Selector:
    """The selection policy that the config names.

    Raises:
        ConfigError: If the name is unknown.
    """
    if config.selector not in SELECTORS:
        valid = ", ".join(map(repr, SELECTORS))
        raise ConfigError(f"selector={config.selector!r} is not valid: choose one of {valid}.")
    return SELECTORS[config.selector]
