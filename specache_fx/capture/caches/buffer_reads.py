"""The attentions of a graph that read buffers of fixed length: SDPA and spelt-out attention, in one form.

    keys = index_copy(buffer, 2, position, k); copy_(buffer, keys)        # a buffer of any form, written in any way
    p = bmm(q, transpose(keys, -1, -2)) * scale; w = _softmax(p + mask, -1); out = bmm(w, values)
        ->  specache.scaled_dot_product_attention(q, keys, values, mask, 0.0, False, scale, True)

`by_indices.py` says what keys and values are moved from. Spelt-out attention is read as in a graph whose caches grow,
and proved for all queries (`run_form.py`); a prompt of more than 2^23 scores is left alone. It is written anew, for its
own operations have the buffer's length in their arguments. Only a softcap, sinks, or a bias wider than the query keep
it spelt out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.attention.normalize_attention import from_sdpa
from specache_fx.capture.attention.random_numbers import dense
from specache_fx.capture.attention.run_form import from_softmax, in_model_order
from specache_fx.capture.caches.by_indices import ById
from specache_fx.capture.caches.cache_records import Tokens, Written
from specache_fx.capture.caches.cache_views import attentions_of, read_sides
from specache_fx.capture.caches.heads_first import is_known
from specache_fx.capture.caches.id_runs import MADE, Operand, leaves_of
from specache_fx.capture.graph.graph_edit import CallsOnce, call, fake_mode_of, origin_of
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    described,
    is_float,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import LeaveAlone, UnknownFormError
from specache_fx.capture.graph.trace import inline
from specache_fx.capture.program import AttentionCore
from specache_fx.runtime.handle_form import MOST_DIMS
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
_WRITES = (
    _aten.index_copy.default, _aten.index_put.default, _aten.slice_scatter.default, _aten.scatter.src,
)  # fmt: skip
_ENDS = (SDPA, _aten._softmax.default, _aten.mm.default, _aten.addmm.default)


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


def cores_of(
    gm: GraphModule, reads: Sequence[BufferRead], tokens_of: Callable[[Written], Node]
) -> list[AttentionCore]:
    """What attentions over buffers compute. What is spelt out may get nodes that describe its mask.

    Args:
        gm: The graph.
        reads: The attentions.
        tokens_of: This call's tokens, `[batch, num_kv_heads, q_len, head_dim]`.

    Raises:
        LeaveAlone: If the form of one isn't known, or another one is computed from the buffers.
    """
    calls, known = CallsOnce(), {read.attention: read for read in reads}
    values = {side.tensor for read in reads for side in read.sides}
    ends = {node for node in gm.graph.nodes if node.target in _ENDS}
    cores = list[AttentionCore]()
    for node in list(gm.graph.nodes):
        if node.target is SDPA and node in known:
            if known[node].sides[0].is_tiled:
                _with_sides(known[node], tokens_of)
            cores.append(from_sdpa(gm, node, calls))
        elif node in known:
            cores.append(_spelt_out(gm, node, _with_sides(known[node], tokens_of), calls))
        # Not what other attentions made of them: a softmax of another kind reads hidden states.
        elif node.target is _aten._softmax.default and values & ancestors([node], values | ends - {node}):
            _spelt_out(gm, node, values, calls)
            raise LeaveAlone(
                f"{described(node)} is computed from a cache of fixed length that is not its keys"
            )
    return cores


def _with_sides(read: BufferRead, tokens_of: Callable[[Written], Node]) -> set[Node]:
    """Have an attention read keys and values with heads first, that stand for what it reads of buffers."""
    sides = list[Node]()
    for operand, side in zip(read.operands, read.sides, strict=True):
        batch, heads, _, dim = shape_of(new := tokens_of(side)) or ()
        tokens = (shape_of(operand.node) or ())[-1 if operand.transposed else -2]
        with operand.reader.graph.inserting_before(operand.reader):
            node = operand.reader.graph.call_function(_tokens_in_buffer, (operand.node,))
        with fake_mode_of([value_of(new)]), torch.no_grad():  # type: ignore[union-attr]
            value = value_of(new).new_empty((batch, heads, tokens, dim))
        node.meta = {**origin_of(operand.node), "val": value}
        sides.append(node)
    read_sides(read.attention, read.operands, sides, is_tiled=read.sides[0].is_tiled)
    return set(sides)


def _tokens_in_buffer(operand: torch.Tensor) -> torch.Tensor:
    """Stands in a graph for what an attention reads of a buffer, heads first. It never runs."""
    raise AssertionError


def _spelt_out(gm: GraphModule, softmax: Node, sides: set[Node], calls: CallsOnce) -> AttentionCore:
    outputs = {*gm.graph.output_node().all_input_nodes, *sides}
    try:
        core = from_softmax(gm, softmax, outputs, calls, is_replaced=True)
    except UnknownFormError as error:
        raise LeaveAlone(f"an attention reads a cache of fixed length, and {error}", error.remedy) from error
    if core.problem is not None:
        raise LeaveAlone(*core.problem)
    return core


def write(graph: Graph, core: AttentionCore, key: Node, value: Node, mask: Node | None) -> Node:
    """Write an attention over tokens that are there. Inserted at the graph's insertion point.

    Args:
        graph: The graph.
        core: The attention.
        key: `[batch, num_kv_heads, kv_len, key_dim]`.
        value: `[batch, num_kv_heads, kv_len, value_dim]`.
        mask: Of these tokens.
    """
    node = core.node
    is_sdpa = node.target is SDPA
    if is_sdpa or (core.softcap is None and core.sinks is None and not _is_wide_bias(core)):
        if mask is not None and value_of(mask).is_floating_point():
            mask = _cast(graph, mask, core)
        form = node.args[4:7] if is_sdpa else (0.0, False, core.scale)
        out = call(graph, SDPA, (core.query, key, value, mask, *form, True), node)
    else:
        spelt = partial(dense, scale=core.scale, softcap=core.softcap)
        out = inline(graph, spelt, (core.query, key, value, mask, core.sinks), node)
    if core.is_turned:
        out = in_model_order(graph, out, (shape_of(key) or ())[1], node)
    shape = shape_of(node) or ()
    if not same_sizes(
        shape, shape_of(out) or ()
    ):  # heads may be in groups, among the rows, or one with the batch
        dims = [
            size if isinstance(size, int) else call(graph, _aten.sym_size.int, (core.query, 2), node)
            for size in shape[1:]
        ]
        out = call(graph, _aten.reshape.default, (out, [-1, *dims]), node)
    return out


def _is_wide_bias(core: AttentionCore) -> bool:
    """Whether a mask has numbers that the query's dtype would round. Those of a mask that only hides have none."""
    if core.mask is None or not value_of(core.mask).is_floating_point():
        return False
    wider = value_of(core.mask).dtype.itemsize > value_of(core.query).dtype.itemsize
    return wider and not _hides_alone(core.mask)


def _hides_alone(mask: Any) -> bool:
    """Whether a mask is made of fills alone (`_mask_of` in `run_form.py`): zeros, and what hides."""
    if not isinstance(mask, Node):
        return isinstance(mask, float)
    if mask.target in (_aten.full.default, _aten.scalar_tensor.default):
        return True
    fills = ("where", "masked_fill")
    return target_name(mask) in fills and all(
        _hides_alone(arg) for arg in mask.args if value_of(arg).dtype != torch.bool
    )


def _cast(graph: Graph, mask: Node, core: AttentionCore) -> Node:
    """A mask in the query's dtype, as SDPA wants it. The least number stays one: a row may hide all keys."""
    dtype = value_of(core.query).dtype
    if value_of(mask).dtype == dtype:
        return mask
    mask = call(graph, _aten.clamp.default, (mask, torch.finfo(dtype).min), core.node)
    return call(graph, _aten._to_copy.default, (mask,), core.node, kwargs={"dtype": dtype})
