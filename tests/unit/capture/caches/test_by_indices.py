"""What keys and values are made of, found by ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor

from specache_fx.capture.caches.buffer_reads import buffer_reads
from specache_fx.capture.caches.by_indices import ById
from specache_fx.capture.caches.cache_records import Written
from specache_fx.capture.caches.cache_views import attentions_of
from specache_fx.runtime.handles.handle_form import HEADS_FIRST, TOKENS_FIRST

Q, K, PAST = torch.randn(2, 4, 1, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 5, 2, 8)
BUFFER, ROW = torch.zeros(2, 2, 64, 8), torch.tensor([7])
Read = Callable[[Tensor], Tensor]


def moved(read: Read) -> list[Written] | None:
    """Of attention over a cache with tokens first that grows; `read` makes heads first of it."""

    def function(q: Tensor, k: Tensor, past: Tensor) -> Any:
        keys = torch.cat([past, k], 1)
        return F.scaled_dot_product_attention(q, read(keys), read(keys), enable_gqa=True), keys

    gm = graphs.traced(function, Q, K, PAST)
    ((_, operands),) = attentions_of(gm)
    return ById(gm).moved(operands, gm.graph.output_node().all_input_nodes[1:])


@pytest.mark.parametrize(
    ("read", "is_tiled"),
    [
        (lambda keys: keys.transpose(1, 2), False),
        (lambda keys: keys.repeat_interleave(2, 2).transpose(1, 2), False),
        (lambda keys: keys.repeat(1, 1, 2, 1).permute(0, 2, 1, 3), True),
    ],
    ids=["as they are", "each by itself", "in turn"],
)
def test_a_cache_that_grows_has_form_heads_and_past(read: Read, is_tiled: bool) -> None:
    found = moved(read)
    assert found is not None
    for side in found:
        assert (side.form, side.num_kv_heads, side.is_tiled) == (TOKENS_FIRST, 2, is_tiled)
        assert side.is_input and (side.capacity, side.q_len) == (6, 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda keys: keys.transpose(1, 2)[:, :, 1:],
        lambda keys: keys.transpose(1, 2) * 2,
        lambda keys: keys.flip(1).transpose(1, 2),
        lambda keys: keys.transpose(1, 2).double().float(),
    ],
    ids=["some tokens", "computed", "in reverse", "rounded"],
)
def test_what_is_no_move_of_all_tokens_is_none(read: Read) -> None:
    assert moved(read) is None


def test_a_buffer_has_the_node_that_says_where_tokens_are_written() -> None:
    def function(q: Tensor, k: Tensor, keys: Tensor, values: Tensor, row: Tensor) -> Any:
        new = k.transpose(1, 2)
        for buffer in (keys, values):
            buffer.index_copy_(2, row, new)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    gm = graphs.traced(function, Q, K, BUFFER, BUFFER.clone(), ROW)
    ((keys, values),) = (read.sides for read in buffer_reads(gm))
    for side in (keys, values):
        assert (side.form, side.capacity, side.end, side.reads_new) == (HEADS_FIRST, 64, None, False)
        assert side.position.op == "placeholder" and side.position.meta["val"].shape == (1,)
    assert keys.buffer is not values.buffer
