"""Buffers that keep a layer's newest tokens, as transformers' StaticSlidingWindowLayer: what is read and written there.

    keys = index_put(roll(buffer, -1, 2), [None, None, [-1]], k); copy_(buffer, keys)       full, one token
    keys = cat([buffer[:, :, 1:], k], 2);      copy_(buffer, keys[:, :, -window:])          full, several
    keys = cat([buffer[:, :, :count], k], 2);  copy_(buffer, keys[:, :, -window:])          becoming full
    keys = k;                                  copy_(buffer, keys[:, :, -window:])          a prompt longer than that

Attention reads `keys`. Until it is full such a buffer is written like any other, and is told by being shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.buffer_writes import Append, Tokens
from specache_fx.capture.graph_slices import constant_of
from specache_fx.capture.graph_utils import END, concatenated, newest, output_node, shape_of

_aten = torch.ops.aten


def with_windows(gm: GraphModule, found: Mapping[Node, Append]) -> dict[Node, Append]:
    """The writes of a graph, those of windows too.

    Args:
        gm: The graph.
        found: From `appends`.
    """
    longest = max((append.capacity for append in found.values()), default=0)
    known = {
        node: replace(append, window=append.capacity) if append.capacity < longest else append
        for node, append in found.items()
    }
    for buffer, value in _written(gm.graph):
        append = _rolled(gm, buffer, value) or _newest_of(buffer, value)
        if append is not None:
            known.setdefault(append.node, append)
    return known


def _written(graph: Graph) -> list[tuple[Node | None, Node]]:
    """The writes to each input; and outputs that may be buffers which are made in this call, without an input."""
    writes: list[tuple[Any, Any]] = [
        node.args[:2] for node in graph.nodes if node.target is _aten.copy_.default
    ]
    made = (node for node in output_node(graph).all_input_nodes if node.target is _aten.clone.default)
    return [*writes, *((None, node) for node in made)]


def _rolled(gm: GraphModule, buffer: Node | None, value: Node) -> Append | None:
    """One token, written behind the others of a full buffer, which move down a row."""
    put: Any = value.args[0] if value.target is _aten.clone.default else value
    if buffer is None or not isinstance(put, Node) or put.target is not _aten.index_put.default:
        return None
    args: Any = put.args
    rolled, indices, new, *accumulates = args
    if rolled.target is not _aten.roll.default or rolled.args[0] is not buffer or any(accumulates):
        return None
    shifts, dims = (list(each) for each in rolled.args[1:])
    places = [i for i, index in enumerate(indices) if index is not None]
    sizes = shape_of(new) or ()
    if shifts != [-1] or [dim % 4 for dim in dims] != [2] or places != [2] or len(sizes) != 4:
        return None
    one_token = shape_of(indices[2]) == (1,) and sizes[2] == 1
    if not one_token or constant_of(gm, indices[2]) not in (-1, _window(buffer) - 1):
        return None
    return Append(value, buffer, 2, 0, new, _window(buffer), Tokens.FULL, value)


def _newest_of(buffer: Node | None, value: Node) -> Append | None:
    """The newest tokens of what attention reads, written over the whole buffer."""
    part: Any = value.args[0] if value.target is _aten.clone.default else value
    if not isinstance(part, Node) or part.op != "call_function":
        return None
    window, keys = newest(part), part.args[0]
    if window is None or not isinstance(keys, Node) or shape_of(part)[2] != window:  # type: ignore[index]
        return None
    if buffer is not None and _window(buffer) != window:
        return None
    parts, dim = concatenated(keys) or ([], 0)
    if buffer is None or buffer not in {origin for each in parts for origin in each.all_input_nodes}:
        # In a first call there is no buffer yet: what it returns stands for one.
        return Append(keys, buffer or value, 2, 0, keys, window, Tokens.NONE, value)
    if len(parts) != 2 or dim != 2 or parts[0].target is not _aten.slice.Tensor:
        return None
    args, defaults = list[Any](parts[0].args), list[Any]((0, None, None))
    source, along, start, end, *step = args + defaults[len(args) - 1 :]
    if source is not buffer or along % 4 != 2 or step not in ([], [1]):
        return None
    if (start, end) in ((1, END), (1, window)):
        return Append(keys, buffer, 2, 0, parts[1], window, Tokens.FULL, value)
    if start in (0, None):
        return Append(keys, buffer, 2, end, parts[1], window, Tokens.SOME, value)
    return None


def _window(buffer: Node) -> int:
    """Rows of a buffer."""
    dims = shape_of(buffer) or ()
    return dims[2] if len(dims) == 4 and isinstance(dims[2], int) else 0
