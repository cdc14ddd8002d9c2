"""Attentions over buffers that a model writes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx import GraphModule

from specache_fx.capture.caches.buffer_reads import buffer_reads, has_past, writes_tokens

ROOM = 64


def step(write: Callable[..., None], q_len: int = 1, count: int | None = None) -> GraphModule:
    """A call of `q_len` tokens that `write` puts into two buffers, of which attention reads `count` rows."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Any:
        write(keys, k, rows)
        write(values, v, rows)
        return F.scaled_dot_product_attention(q, keys[:, :, :count], values[:, :, :count])

    new, buffers = (
        [torch.randn(1, 2, q_len, 8) for _ in range(3)],
        [torch.zeros(1, 2, ROOM, 8) for _ in range(2)],
    )
    return graphs.traced(function, *new, *buffers, torch.arange(q_len))


def copied(buffer: Tensor, new: Tensor, rows: Tensor) -> None:
    buffer.index_copy_(2, rows, new)


def put(buffer: Tensor, new: Tensor, rows: Tensor) -> None:
    buffer[:, :, rows] = new


def added(buffer: Tensor, new: Tensor, rows: Tensor) -> None:
    buffer.index_add_(2, rows, new)


@pytest.mark.parametrize("write", [copied, put])
def test_an_attention_over_what_is_written_is_found(write: Callable[..., None]) -> None:
    gm = step(write)
    (read,) = buffer_reads(gm)
    assert read.attention in graphs.nodes_of(gm, read.attention.target)
    assert [side.capacity for side in read.sides] == [ROOM, ROOM]
    assert writes_tokens(gm) and has_past([read])


def test_several_tokens_are_a_prompt() -> None:
    reads = buffer_reads(step(copied, q_len=3))
    assert reads and not has_past(reads)


def test_a_sum_is_no_write_of_tokens() -> None:
    gm = step(added)
    assert buffer_reads(gm) == [] and not writes_tokens(gm)


def test_a_counter_is_no_buffer() -> None:
    gm = graphs.traced(lambda x, count: x + count.add_(1), torch.ones(2), torch.zeros(1))
    assert buffer_reads(gm) == [] and not writes_tokens(gm)
