"""Writes of a call's tokens into buffers of fixed length, and what attends to them.

    keys = index_copy(buffer, 2, position, k); copy_(buffer, keys)      buffer.index_copy_(2, position, k)
    keys = index_put(buffer, [None, None, position], k); ...            buffer[:, :, position] = k
    keys = slice_scatter(buffer, k, 2, start, end); ...                 buffer[:, :, start:end] = k
    keys = index_put(buffer[:batch], ...)
    copy_(buffer, slice_scatter(buffer, keys, 0, 0, batch))             buffer[:batch, :, position] = k

A buffer is `[rows, num_kv_heads, capacity, head_dim]`, or has tokens first, in dimension 1. It has as many rows as the
batch, or more. One that keeps the newest tokens alone, as transformers' StaticSlidingWindowLayer, is a window:

    keys = index_put(roll(buffer, -1, 2), [None, None, [-1]], k); copy_(buffer, keys)       full, one token
    keys = cat([buffer[:, :, 1:], k], 2);      copy_(buffer, keys[:, :, -window:])          full, several
    keys = cat([buffer[:, :, :count], k], 2);  copy_(buffer, keys[:, :, -window:])          becoming full
    keys = k;                                  copy_(buffer, keys[:, :, -window:])          a prompt longer than that

Attention reads `keys`. Until it is full a window is written like any other buffer, and is told by being shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.cache_side import without_repeat
from specache_fx.capture.graph_slices import constant_of
from specache_fx.capture.graph_utils import (
    END,
    concatenated,
    cut_of,
    is_float,
    newest,
    same_sizes,
    shape_of,
    swaps,
    value_of,
)

_aten = torch.ops.aten
_WRITES = (
    _aten.index_copy.default, _aten.index_put.default, _aten.slice_scatter.default, _aten.scatter.src,
)  # fmt: skip
_MADE = (_aten.zeros.default, _aten.full.default, _aten.new_zeros.default, _aten.zeros_like.default)


class Tokens(Enum):
    """The number of tokens that a buffer holds before a call, by its way of writing."""

    ANY = "any"
    NONE = "none"
    SOME = "some"  # `Append.position` of them
    FULL = "as many as it has room for"


@dataclass(frozen=True)
class Append:
    """This call's tokens, written into a buffer.

    Attributes:
        node: What an attention reads.
        buffer: An input, or a tensor that is made in this call.
        dim: Dimension of the tokens.
        position: Where the first token is written, or where each is. It tells nothing with `Tokens.NONE` and `FULL`.
        new: The tokens.
        window: Tokens that the buffer has room for, where it keeps the newest; None where it keeps all.
        before: Tokens that it has to hold before this call.
        kept: What is in the buffer after this call; None where that is `node`.
    """

    node: Node
    buffer: Node
    dim: int
    position: Any
    new: Node
    window: int | None = None
    before: Tokens = Tokens.ANY
    kept: Node | None = None

    @property
    def written(self) -> Node:
        """The buffer's content after this call."""
        return self.kept or self.node

    @property
    def capacity(self) -> Any:
        """Tokens that the buffer has room for."""
        return (shape_of(self.written) or ())[self.dim]

    @property
    def q_len(self) -> Any:
        """The number of tokens that are written."""
        sizes = shape_of(self.new) or ()
        return sizes[self.dim - 4]


def _of_first_rows(node: Any) -> Append | None:
    """The write of a node into the first rows of an input's batch, `_write(buffer[:batch])`; None for another node."""
    if not isinstance(node, Node) or node.target is not _aten.slice_scatter.default:
        return None
    buffer, part, *_ = node.args
    inner = _write(part) if isinstance(part, Node) else None
    if inner is None or inner.buffer.target is not _aten.slice.Tensor or inner.buffer.args[0] is not buffer:
        return None
    firsts = (cut for each in (node, inner.buffer) if (cut := cut_of(each)) is not None)
    is_first = all((dim, start, step) == (0, 0, 1) for dim, start, _, step in firsts)
    return replace(inner, buffer=inner.buffer.args[0], kept=node) if is_first else None  # type: ignore[arg-type]


def _write(node: Node) -> Append | None:
    """The write of a node into a 4-D tensor along its tokens; None for another node."""
    args: Any = node.args
    if node.target is _aten.index_copy.default:
        buffer, dim, position, new = args
    elif (put := _put(node)) is not None:
        buffer, dim, position, new = put
    elif node.target is _aten.slice_scatter.default:
        buffer, new = args[:2]
        dim, position, _, step = cut_of(node) or (0, 0, 0, 0)
        if step != 1:
            return None
    else:
        return None
    dims, sizes = shape_of(buffer) or (), shape_of(new) or ()
    if len(sizes) == 3 and dims[:1] == (1,):  # `buffer[:, :, position] = new` of one batch row
        sizes = (1, *sizes)
    fits = len(dims) == len(sizes) == 4 and dim % 4 in (1, 2)
    chooses = isinstance(value_of(position), torch.Tensor) and value_of(position).dtype == torch.bool
    if not fits or chooses or len(shape_of(position) or (0,)) > 1:
        return None
    others = [i for i in range(4) if i != dim % 4]
    if not same_sizes([dims[i] for i in others], [sizes[i] for i in others]):
        return None
    return Append(node, buffer, dim % 4, position, new)


def _put(node: Any) -> tuple[Any, int, Node, Any] | None:
    """Tensor, dimension, index and new numbers of `x[..., index] = new`; None for another node."""
    if not isinstance(node, Node) or node.target is not _aten.index_put.default:
        return None
    args: Any = node.args
    tensor, indices, new, *accumulates = args
    places = [i for i, index in enumerate(indices) if index is not None]
    return (tensor, places[0], indices[places[0]], new) if len(places) == 1 and not any(accumulates) else None


def appends(graph: Graph) -> dict[Node, Append]:
    """The writes that are the whole change of an input, or that an output is."""
    written = {node.args[0]: node.args[1] for node in graph.nodes if node.target is _aten.copy_.default}
    outputs = set(graph.output_node().all_input_nodes)
    found = {}
    for node in graph.nodes:
        append = _write(node) if node.op == "call_function" else None
        if append is None:
            continue
        made = append.buffer.target in _MADE and value_of(append.buffer).is_floating_point()
        if written.get(append.buffer) is node or (made and node in outputs):
            found[node] = append
    of_rows = (_of_first_rows(value) for buffer, value in written.items() if buffer.op == "placeholder")
    return found | {append.node: append for append in of_rows if append is not None}


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
    made = (node for node in graph.output_node().all_input_nodes if node.target is _aten.clone.default)
    return [*writes, *((None, node) for node in made)]


def _rolled(gm: GraphModule, buffer: Node | None, value: Node) -> Append | None:
    """One token, written behind the others of a full buffer, which move down a row."""
    put = _put(value.args[0] if value.target is _aten.clone.default else value)
    if buffer is None or put is None:
        return None
    rolled, dim, index, new = put
    if rolled.target is not _aten.roll.default or rolled.args[0] is not buffer or dim != 2:
        return None
    shifts, dims = (list(each) for each in rolled.args[1:])
    sizes = shape_of(new) or ()
    one_token = shape_of(index) == (1,) and len(sizes) == 4 and sizes[2] == 1
    if shifts != [-1] or [each % 4 for each in dims] != [2] or not one_token:
        return None
    if constant_of(gm, index) not in (-1, _window(buffer) - 1):
        return None
    return Append(value, buffer, 2, 0, new, _window(buffer), Tokens.FULL, value)


def _newest_of(buffer: Node | None, value: Node) -> Append | None:
    """The newest tokens of what attention reads, written over the whole buffer."""
    part: Any = value.args[0] if value.target is _aten.clone.default else value
    if not isinstance(part, Node) or part.op != "call_function":
        return None
    window, keys = newest(part), part.args[0]
    if window is None or not isinstance(keys, Node) or (shape_of(part) or ())[2:-1] != (window,):
        return None
    if buffer is not None and _window(buffer) != window:
        return None
    parts, dim = concatenated(keys) or ([], 0)
    if buffer is None or buffer not in {origin for each in parts for origin in each.all_input_nodes}:
        # In a first call there is no buffer yet: what it returns stands for one.
        return Append(keys, buffer or value, 2, 0, keys, window, Tokens.NONE, value)
    if len(parts) != 2 or dim != 2 or parts[0].args[:1] != (buffer,):
        return None
    along, start, end, step = cut_of(parts[0]) or (None,) * 4
    if (along, step) != (2, 1) or start not in (0, 1) or (start == 1 and end not in (END, window)):
        return None
    position, before = (end, Tokens.SOME) if start == 0 else (0, Tokens.FULL)
    return Append(keys, buffer, 2, position, parts[1], window, before, value)


def _window(buffer: Node) -> int:
    """Rows of a buffer."""
    dims = shape_of(buffer) or ()
    return dims[2] if len(dims) == 4 and isinstance(dims[2], int) else 0


def unread(found: Mapping[Node, Append]) -> dict[Node, Append]:
    """The writes whose result nothing reads, by their tokens: a prompt may attend to these instead."""
    by_tokens = {}
    for append in found.values():
        if all(user.op == "output" or user.target is _aten.copy_.default for user in append.node.users):
            new: Any = append.new
            while new.target in (_aten.clone.default, _aten.reshape.default):
                if not same_sizes((shape_of(new) or ())[-3:], (shape_of(new.args[0]) or ())[-3:]):
                    break
                new = new.args[0]  # Python leaves a batch of one row out
            if len(shape_of(new) or ()) == 4:
                by_tokens[new] = append
    return by_tokens


def read_by(side: Any, found: Mapping[Node, Append]) -> tuple[Append, list[Any]] | None:
    """The write whose result an attention's keys or values are a view of; None where they are none of one.

    Args:
        side: Keys or values, `[batch, heads, kv_len, head_dim]`.
        found: From `appends`.

    Returns:
        The write, and where slices of the buffer's first tokens end.
    """
    tokens, ends = 2, list[Any]()  # the dimension of tokens, on the way from the attention to the buffer
    while side not in found:
        side, repeat = without_repeat(side) if tokens == 2 else (side, [])
        if repeat:
            continue
        dim, start, end, step = cut_of(side) or (None,) * 4
        if side.target is _aten.slice.Tensor and (dim, start, step) == (tokens, 0, 1):
            ends.append(end)
        elif swaps(side, 1, 2):
            tokens = 3 - tokens
        else:
            return None
        side = side.args[0]
    return (found[side], ends) if found[side].dim == tokens else None


def writes_tokens(gm: GraphModule) -> bool:
    """Whether a functional graph writes parts of an input of 3 dimensions or more, as it would tokens."""
    for node in gm.graph.nodes:
        if node.target is _aten.copy_.default and is_float(node.args[0], 5):
            buffer, value = node.args
            while value.target in _WRITES:
                value = value.args[0]
            if value is buffer is not node.args[1] and len(shape_of(buffer) or ()) > 2:
                return True
    return False
