"""The attentions of a graph that read buffers of fixed length: SDPA and spelt-out attention.

    keys = index_copy(buffer, 2, position, k); copy_(buffer, keys)        # a buffer of any form, written in any way
    out = sdpa(q, keys, values, mask)

`by_indices.py` says what keys and values are moved from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.caches.by_indices import ById
from specache_fx.capture.caches.cache_records import Tokens, Written
from specache_fx.capture.caches.cache_views import attentions_of
from specache_fx.capture.caches.heads_first import is_known
from specache_fx.capture.caches.id_runs import MADE, Operand, leaves_of
from specache_fx.capture.graph.graph_utils import is_float, shape_of
from specache_fx.runtime.handles.handle_form import MOST_DIMS

_aten = torch.ops.aten
_WRITES = (
    _aten.index_copy.default, _aten.index_put.default, _aten.slice_scatter.default, _aten.scatter.src,
)  # fmt: skip


@dataclass(frozen=True)
class BufferRead:
    """An attention over buffers.

    Attributes:
        attention: An SDPA, or a softmax.
        operands: Its keys and values.
        sides: What these are made of.
    """

    attention: Node
    operands: list[Operand]
    sides: list[Written]


def buffer_reads(gm: GraphModule) -> list[BufferRead]:
    """The attentions of a graph over buffers that it writes this call's tokens into."""
    writes, by_id = _writes_of(gm.graph), ById(gm)
    found = [
        BufferRead(attention, operands, sides)
        for attention, operands in (attentions_of(gm) if writes else ())
        if (sides := by_id.written(operands, writes)) is not None and is_known(sides)
    ]
    of_all = [side.capacity for read in found for side in read.sides if side.window is None]
    if not of_all:  # an output of the newest tokens alone is no buffer
        return [read for read in found if all(side.is_input for side in read.sides)]

    def as_window(side: Written) -> Written:
        """One that is shorter than the others keeps the newest tokens, until it is full it is written like these."""
        shorter = side.window is None and side.capacity < max(of_all)
        return replace(side, window=side.capacity) if shorter else side

    return [replace(read, sides=[*map(as_window, read.sides)]) for read in found]


def _writes_of(graph: Graph) -> dict[Node, Node | None]:
    """What is in each buffer that is written: an input, or a result that this call makes for an output."""
    writes: dict[Node, Node | None] = {}
    for out in graph.output_node().all_input_nodes:
        if is_float(out, MOST_DIMS) and len(shape_of(out) or ()) > 2 and out.op != "placeholder":
            made = [
                leaf for leaf in leaves_of([out]) if leaf.target in MADE and shape_of(leaf) == shape_of(out)
            ]
            if made or out.target is _aten.clone.default:
                writes[out] = made[0] if made else None
    for node in graph.nodes:
        if node.target is _aten.copy_.default and len(shape_of(node) or ()) > 2 and is_float(node, MOST_DIMS):
            buffer, value = node.args
            writes[value] = buffer
    return writes


def writes_tokens(gm: GraphModule) -> bool:
    """Whether a functional graph writes parts of an input of 3 dimensions or more, as it would tokens."""
    for value, buffer in _writes_of(gm.graph).items():
        start: Any = value
        while start.target in _WRITES:
            start = start.args[0]
        if start is buffer is not value and buffer.op == "placeholder":
            return True
    return False


def has_past(reads: Sequence[BufferRead]) -> bool:
    """Whether the call that a graph is compiled for follows others: it has one token, but for a prompt of one."""
    sides = [side for read in reads for side in read.sides]
    if any(side.before is not Tokens.ANY for side in sides):
        return any(side.before in (Tokens.SOME, Tokens.FULL) for side in sides)
    return sides[0].is_input and isinstance(sides[0].q_len, int) and sides[0].q_len == 1
