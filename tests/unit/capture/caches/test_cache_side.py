"""A side of an attention: heads that are repeated, what grows, and what else reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import graphs
from torch import Tensor
from torch.fx import Node

from specache_fx.capture.caches.cache_side import grows, other_reader, without_repeat
from specache_fx.capture.graph.graph_utils import placeholders

KEYS, NEW = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 1, 8)


def result_of(function: Callable[..., Tensor], *tensors: Tensor) -> Node:
    (node,) = graphs.traced(function, *tensors).graph.output_node().all_input_nodes
    return node


@pytest.mark.parametrize(
    ("repeat", "is_repeat"),
    [
        (lambda k: k[:, :, None].expand(-1, -1, 4, -1, -1).reshape(2, 12, 5, 8), True),
        (lambda k: k.view(2, 3, 1, 5, 8).expand(2, 3, 4, 5, 8).reshape(2, 12, 5, 8), True),
        (lambda k: k.repeat_interleave(4, 1), True),
        (lambda k: k[:, None].expand(-1, 4, -1, -1, -1).reshape(2, 12, 5, 8), False),
        (lambda k: k.repeat(1, 4, 1, 1), False),
        (lambda k: k[:, :, :, None].expand(-1, -1, -1, 4, -1).reshape(2, 3, 20, 8), False),
    ],
    ids=["expanded", "viewed", "interleaved", "in turn by views", "in turn", "tokens"],
)
def test_heads_repeated_each_by_itself_are_the_heads(
    repeat: Callable[[Tensor], Tensor], is_repeat: bool
) -> None:
    node = result_of(repeat, KEYS)
    assert (without_repeat(node).op == "placeholder") == is_repeat
    assert is_repeat or without_repeat(node) is node


@pytest.mark.parametrize(
    ("append", "expected"),
    [
        (lambda past, new: torch.cat([past, new], 2), True),
        (lambda past, new: torch.cat([past, new], 2)[:, :, -3:], True),
        (lambda past, new: torch.cat([past.transpose(1, 2), new.transpose(1, 2)], 1), True),
        (lambda past, new: torch.cat([past * 2, new], 2), False),
        (lambda past, new: past + new, False),
    ],
    ids=["whole", "newest", "turned", "changed", "added"],
)
def test_a_cache_grows_by_an_append_to_an_input(append: Callable[..., Tensor], expected: bool) -> None:
    assert grows(result_of(append, KEYS, NEW)) == expected


def test_a_reader_of_a_shape_is_no_reader() -> None:
    gm = graphs.traced(lambda k: (k * 2, k.new_zeros(k.shape), k.sum()), KEYS)
    (keys,), (doubled, _, total) = placeholders(gm.graph), gm.graph.output_node().all_input_nodes
    assert other_reader(keys, {doubled}) is total
    assert other_reader(keys, {doubled, total}) is None
