"""The selection of the KV pairs to prefetch, given scores."""

from __future__ import annotations

from specache_fx.runtime.select.aggregate import AGGREGATIONS
from specache_fx.runtime.select.topk import count_overlap, select_topk, topk_overlap

__all__ = ["AGGREGATIONS", "count_overlap", "select_topk", "topk_overlap"]
