"""Selectors: which KV pairs to prefetch, given scores. Each is a file and a line in `SELECTORS`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specache_fx.runtime.select.topk import select_topk

__all__ = ["SELECTORS", "Selector", "select_topk"]

Selector = Callable[[torch.Tensor, int], torch.Tensor]
"""float32 scores `[batch, num_kv_heads, tokens]`, top_k -> int32 `[batch, num_kv_heads, top_k]`."""

SELECTORS: dict[str, Selector] = {"topk": select_topk}
