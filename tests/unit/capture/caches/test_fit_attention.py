"""What spelt-out attention over a buffer may do with its largest score, which may be that of a hidden row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from specache_fx.capture.caches.fit_attention import is_subtracted
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
