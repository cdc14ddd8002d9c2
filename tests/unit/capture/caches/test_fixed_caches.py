"""Buffers that a model writes in place, as caches that grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx import GraphModule

from specache_fx.capture.caches.buffer_reads import buffer_reads
from specache_fx.capture.caches.buffers import FixedCaches
from specache_fx.capture.caches.fixed_caches import grow
from specache_fx.capture.graph.graph_utils import placeholders, shape_of
from specache_fx.capture.graph.left_alone import LeaveAlone

ROOM, ATEN = 64, torch.ops.aten


def inputs(q_len: int = 1) -> list[Tensor]:
    new = [torch.randn(1, 2, q_len, 8) for _ in range(3)]
    buffers = [torch.zeros(1, 2, ROOM, 8) for _ in range(2)]
    return [*new, *buffers, torch.arange(q_len) + 3]


def call(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    keys.index_copy_(2, rows, k)
    values.index_copy_(2, rows, v)
    mask = torch.arange(ROOM) <= rows[:, None]
    return F.scaled_dot_product_attention(q, keys, values, mask)


def grown(function: Any, *tensors: Tensor, has_past: bool) -> tuple[GraphModule, FixedCaches]:
    gm = graphs.traced(function, *tensors)
    return grow(gm, buffer_reads(gm), has_past=has_past)


def test_a_step_appends_to_the_tokens_that_are_there() -> None:
    given = inputs()
    gm, plan = grown(call, *given, has_past=True)
    assert not graphs.nodes_of(gm, ATEN.copy_.default) and not graphs.nodes_of(gm, ATEN.index_copy.default)
    caches = [node.args[0] for node in graphs.nodes_of(gm, ATEN.cat.default)]
    assert {past for past, _ in caches} == {*placeholders(gm.graph)[3:5]}  # type: ignore[misc]
    assert plan.is_step and [buffer.place for buffer in plan.buffers] == [3, 4]
    q_len, batch, rooms, (rows,), *_ = plan.numbers(given)
    assert (q_len, batch, rooms, rows.tolist()) == (1, 1, [ROOM, ROOM], [3])


def test_a_graph_that_grows_computes_the_same() -> None:
    given = inputs()
    for buffer in given[3:5]:
        buffer[:, :, :3] = torch.randn(1, 2, 3, 8)
    gm, _ = grown(call, *given, has_past=True)
    mine = [*given[:3], *(buffer[:, :, :3].clone() for buffer in given[3:5]), given[5]]
    out, keys, values = gm(*mine)
    torch.testing.assert_close(out, call(*given))
    assert torch.equal(keys, given[3][:, :, :4]) and torch.equal(values, given[4][:, :, :4])


def test_a_prompt_attends_to_its_own_tokens() -> None:
    gm, plan = grown(call, *inputs(4), has_past=False)
    assert not graphs.nodes_of(gm, ATEN.cat.default) and not plan.is_step
    _, keys, values = gm.graph.output_node().all_input_nodes
    assert [keys, values] == placeholders(gm.graph)[1:3] and shape_of(keys) == (1, 2, 4, 8)


def test_a_mask_is_looked_at_behind_the_tokens() -> None:
    given = inputs()
    _, plan = grown(call, *given, has_past=True)
    assert [bool(shows) for shows in plan.shown(given, torch.tensor(4))] == [False]
    assert [bool(shows) for shows in plan.shown(given, torch.tensor(3))] == [True]


def test_rows_that_nothing_hides_are_refused() -> None:
    def open_to_all(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        keys.index_copy_(2, rows, k)
        values.index_copy_(2, rows, v)
        return F.scaled_dot_product_attention(q, keys, values)

    with pytest.raises(LeaveAlone, match="no mask hides its unwritten rows"):
        grown(open_to_all, *inputs(), has_past=True)


def test_what_else_reads_a_buffer_is_refused() -> None:
    def summed(*given: Tensor) -> Any:
        return call(*given), given[3].sum()

    with pytest.raises(LeaveAlone, match=r"`sum_1` .* reads a cache of fixed length, which holds no numbers"):
        grown(summed, *inputs(), has_past=True)
