"""The attentions of a graph that read buffers of fixed length: SDPA and spelt-out attention, in one form.

    p = bmm(q, transpose(keys, -1, -2)) * scale; w = _softmax(p + mask, -1); out = bmm(w, values)
        ->  specache.scaled_dot_product_attention(q, keys, values, mask, 0.0, False, scale, True)

Spelt-out attention is read as in a graph whose caches grow, and proved for all queries
(`run_form.py`); a prompt of more than 2^23 scores is left alone. It is written anew, for its own operations have the
buffer's length in their arguments. Only a softcap, sinks, or a bias wider than the query keep it spelt out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.buffer_writes import Append, read_by
from specache_fx.capture.cache_side import LeaveAlone, sdpa_instead
from specache_fx.capture.graph_edit import call
from specache_fx.capture.graph_slices import ancestors
from specache_fx.capture.graph_utils import described, same_sizes, shape_of, target_name, value_of
from specache_fx.capture.mask_rows import CallsOnce, UnknownFormError
from specache_fx.capture.normalize_attention import SDPA, from_sdpa
from specache_fx.capture.program import AttentionCore
from specache_fx.capture.random_numbers import dense
from specache_fx.capture.run_form import from_softmax
from specache_fx.capture.trace import inline

_aten = torch.ops.aten
_ENDS = (SDPA, _aten._softmax.default, _aten.mm.default, _aten.addmm.default)


@dataclass(frozen=True)
class Reader:
    """An attention over buffers.

    Attributes:
        core: What it computes, with a mask of all queries.
        keys: What the keys are a view of, and where slices of the first tokens end.
        values: The same of the values.
    """

    core: AttentionCore
    keys: tuple[Append, list[Any]]
    values: tuple[Append, list[Any]]


def is_over(node: Node, found: Mapping[Node, Append]) -> bool:
    """Whether a node is an SDPA over buffers."""
    return node.target is SDPA and any(read_by(side, found) is not None for side in node.args[1:3])


def reads_buffer(node: Node, found: Mapping[Node, Append]) -> bool:
    """Whether a node is an SDPA over buffers, or a softmax of scores that are computed from them."""
    if node.target is not _aten._softmax.default:
        return is_over(node, found)
    # Not what other attentions made of them: a softmax of another kind reads hidden states.
    stop = {*found, *(each for each in node.graph.nodes if each.target in _ENDS and each is not node)}
    return not found.keys().isdisjoint(ancestors([node], stop))


def readers_of(gm: GraphModule, found: Mapping[Node, Append]) -> list[Reader]:
    """The attentions that read buffers. What is spelt out may get nodes that describe its mask.

    Args:
        gm: The graph.
        found: Its writes.

    Raises:
        LeaveAlone: If the keys or the values alone are in a buffer, or its form isn't known.
    """
    readers, calls = list[Reader](), CallsOnce()
    for node in list(gm.graph.nodes):
        if node.target is SDPA:
            core = from_sdpa(gm, node, calls)
            if (sides := _sides(core, found)) is not None:
                readers.append(Reader(core, *sides))
        elif reads_buffer(node, found):
            readers.append(_spelt_out(gm, node, found, calls))
    return readers


def _sides(
    core: AttentionCore, found: Mapping[Node, Append]
) -> tuple[tuple[Append, list[Any]], tuple[Append, list[Any]]] | None:
    of_keys, of_values = (read_by(side, found) for side in (core.key, core.value))
    if of_keys is None and of_values is None:
        return None
    if of_keys is None or of_values is None:
        one = f"keys or values of {described(core.node)} are written in place, and the others are not"
        raise LeaveAlone(one)
    return of_keys, of_values


def _spelt_out(gm: GraphModule, softmax: Node, found: Mapping[Node, Append], calls: CallsOnce) -> Reader:
    outputs = {*gm.graph.output_node().all_input_nodes, *found}
    try:
        core = from_softmax(gm, softmax, outputs, calls, is_replaced=True)
    except UnknownFormError as error:
        raise LeaveAlone(
            f"an attention reads a cache of fixed length, and {error}", sdpa_instead(softmax)
        ) from error
    if core.problem is not None:
        raise LeaveAlone(*core.problem)
    sides = _sides(core, found)
    if sides is None:
        raise LeaveAlone(
            f"{described(softmax)} is computed from a cache of fixed length that is not its keys"
        )
    return Reader(core, *sides)


def write(graph: Graph, reader: Reader, key: Node, value: Node, mask: Node | None) -> Node:
    """Write an attention over tokens that are there. Inserted at the graph's insertion point.

    Args:
        graph: The graph.
        reader: The attention.
        key: `[batch, num_kv_heads, kv_len, key_dim]`.
        value: `[batch, num_kv_heads, kv_len, value_dim]`.
        mask: Of these tokens.
    """
    core, node = reader.core, reader.core.node
    is_sdpa = node.target is SDPA
    if is_sdpa or (core.softcap is None and core.sinks is None and not _is_wide_bias(core)):
        if mask is not None and value_of(mask).is_floating_point():
            mask = _cast(graph, mask, core)
        form = node.args[4:7] if is_sdpa else (0.0, False, core.scale)
        out = call(graph, SDPA, (core.query, key, value, mask, *form, True), node)
    else:
        spelt = partial(dense, scale=core.scale, softcap=core.softcap)
        out = inline(graph, spelt, (core.query, key, value, mask, core.sinks), node)
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
