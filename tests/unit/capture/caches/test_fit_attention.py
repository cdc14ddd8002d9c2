"""What spelt-out attention over a buffer may do with its largest score, which may be that of a hidden row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from specache_fx.capture.caches.buffer_reads import buffer_reads
from specache_fx.capture.caches.fit_attention import is_subtracted
from specache_fx.capture.caches.fixed_caches import grow
from specache_fx.capture.graph.graph_utils import target_name


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda s: s - s.amax(-1, keepdim=True), True),
        (lambda s: s - s.max(-1, keepdim=True).values.expand(2, 3), True),
        (lambda s: s / s.amax(-1, keepdim=True), False),
        (lambda s: s - 0.5 * s.amax(-1, keepdim=True), False),
        (lambda s: s.amax(-1, keepdim=True) - s, False),
    ],
    ids=["amax", "max", "factor", "half", "reversed"],
)
def test_a_largest_score_may_only_be_taken_off(compute: Callable[[Tensor], Tensor], expected: bool) -> None:
    graph = make_fx(compute)(torch.randn(2, 3)).graph
    largest = next(node for node in graph.nodes if target_name(node) in ("max", "amax"))
    assert is_subtracted(largest) == expected


def test_a_mask_that_comes_in_cut_may_be_made_before_this_calls_tokens() -> None:
    """The number of tokens is a sum of the inputs' sizes, and the mask is expanded to it first of all."""

    def call(new: Tensor, keys: Tensor, values: Tensor, start: Tensor, mask: Tensor) -> Tensor:
        q_len = new.shape[2] + 1
        shown = mask.expand(1, 1, q_len, 64)
        q = torch.cat([new, new[:, :, :1]], 2)
        rows = start + torch.arange(q_len)
        keys.index_copy_(2, rows, q)
        values.index_copy_(2, rows, q * 2)
        return F.scaled_dot_product_attention(q, keys, values, shown)

    mask = torch.arange(64).view(1, 1, 1, 64) < 8
    given = [torch.randn(1, 2, 4, 8), *(torch.randn(1, 2, 64, 8) for _ in range(2)), torch.tensor([3]), mask]
    torch._dynamo.mark_dynamic(given[0], 2)
    gm = graphs.traced(call, *given)
    grown, plan = grow(gm, buffer_reads(gm), has_past=True)
    assert len(plan.masks) == 1
    by_name = dict(zip((node.name for node in graphs.placeholders(gm.graph)), range(99), strict=False))
    assert len(by_name) >= len(given) and grown.graph.lint() is None
