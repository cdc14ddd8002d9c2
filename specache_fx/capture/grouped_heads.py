"""`grouped_heads`: query heads that lie in groups beside their KV head get one dimension.

    s = softmax(reshape(bmm(q, k^T), [b, kv, g, q_len, kv_len]) + mask)
        -> s = softmax(reshape(bmm(q, k^T), [b, kv * g, q_len, kv_len]) + flatten(mask, 1, 2))
    s = softmax(transpose(reshape(bmm(q, k^T), [b, h, q_len, kv_len]), 1, 2) + mask)
        -> s = softmax(reshape(bmm(q, k^T), [b, h, q_len, kv_len]) + transpose(mask, -3, -2))
    sdpa(q, unsqueeze(k, 2), unsqueeze(v, 2), mask)              # q [b, kv, g, q_len, d]
        -> unflatten(sdpa(flatten(q, 1, 2), k, v, flatten(mask, 1, 2)), 1, [kv, g])
    sdpa(q, k, v, mask)                                          # q [b, kv, g, d] of one token: heads as rows
        -> reshape(sdpa(reshape(q, [b, kv * g, 1, d]), k, v, mask), [b, kv, g, d])

Einsums such as `bskgd,btkd->bkgst` have groups, and so have models that repeat no keys. Heads as rows, `[b, kv, g *
q_len, d]`, are split in a step of one token. In a prompt such rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from specache_fx.capture.graph_edit import call
from specache_fx.capture.graph_utils import (
    concatenated,
    is_pointwise,
    same_sizes,
    shape_of,
    swaps,
    target_name,
)
from specache_fx.capture.mask_rows import UnknownFormError
from specache_fx.capture.normalize_attention import SDPA
from specache_fx.capture.run_form import path_of

_aten = torch.ops.aten
_OVER_KEYS = (_aten._softmax.default, _aten.amax.default, _aten.slice.Tensor, _aten.cat.default)


def grouped_heads(graph: Graph) -> None:
    """Merge groups, in place."""
    is_step = _is_of_one_token(graph, set(graph.output_node().all_input_nodes))
    for node in list(graph.nodes):
        if node.target is SDPA:
            _merge_operator(node, is_step)
        elif node.target is _aten._softmax.default:
            _merge_scores(node, is_step)


def _is_of_one_token(graph: Graph, outputs: set[Node]) -> bool:
    """Whether a call appends one token to what it returns, or embeds one."""
    for node in graph.nodes:
        parts, dim = concatenated(node) or ([], 0)
        if len(parts) == 2 and parts[0].op == "placeholder" and node in outputs:
            return same_sizes((shape_of(parts[1]) or ())[dim : dim + 1], (1,))
    embedded = (shape_of(node.args[1]) or () for node in graph.nodes if target_name(node) == "embedding")
    return any(dims[-1:] == (1,) for dims in embedded)


def _groups(node: Any, *, rows: bool) -> tuple[int, int] | None:
    """KV heads and groups of `[batch, kv, groups, q_len, n]`, or of a token's `[batch, kv, groups, n]`."""
    dims = shape_of(node) or ()
    if len(dims) != (4 if rows else 5) or not all(isinstance(size, int) for size in dims[1:3]):
        return None
    return dims[1:3] if not rows or dims[2] > 1 else None


def _merge_operator(node: Node, is_step: bool) -> None:
    query, key, value, mask, *rest = node.args
    dims, keys = shape_of(query) or (), (shape_of(key) or ())[1:3]
    if len(shape_of(key) or ()) != len(dims) or len(shape_of(value) or ()) != len(dims):
        return
    rows = len(dims) == 4
    groups = _groups(query, rows=rows)
    if groups is None or (
        rows and (not is_step or rest[1] or keys[0] != groups[0] or same_sizes(keys, groups))
    ):
        return
    graph, (kv_heads, size) = node.graph, groups
    with graph.inserting_before(node):
        if rows:
            query = call(graph, _aten.reshape.default, (query, [-1, kv_heads * size, 1, dims[3]]), node)
        else:
            query = call(graph, _aten.flatten.using_ints, (query, 1, 2), node)
            key, value = (_without_groups(side, groups, node) for side in (key, value))
        mask = _merged(mask, groups, rows, node) if isinstance(mask, Node) else mask
        out = call(graph, SDPA, (query, key, value, mask, *rest[:-1], True), node)
        if rows:
            out = call(graph, _aten.reshape.default, (out, [-1, *(shape_of(node) or ())[1:]]), node)
        else:
            out = call(graph, _aten.unflatten.int, (out, 1, groups), node)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _without_groups(side: Any, groups: tuple[int, int], node: Node) -> Node:
    """Keys or values `[batch, heads, kv_len, dim]` of those that have groups."""
    front = (shape_of(side) or ())[:2]
    while target_name(side) in ("expand", "clone") and same_sizes((shape_of(side.args[0]) or ())[:2], front):
        side = side.args[0]
    if side.target is _aten.unsqueeze.default and side.args[1] in (2, -3):
        return side.args[0]
    if not same_sizes((shape_of(side) or ())[1:2], groups[:1]):  # heads of other groups share it
        side = call(node.graph, _aten.expand.default, (side, [-1, *groups, -1, -1]), node)
    return call(node.graph, _aten.flatten.using_ints, (side, 1, 2), node)


def _merged(mask: Node, groups: tuple[int, int], rows: bool, origin: Node) -> Node:
    """A mask with one dimension for the heads where it has two, KV heads and groups (rows, of one token)."""
    graph, dims = origin.graph, shape_of(mask) or ()
    if rows and len(dims) > 1:
        if dims[-2] != 1 and _is_tiled(mask):
            mask = call(graph, _aten.slice.Tensor, (mask, len(dims) - 2, 0, 1), origin)
        mask = call(graph, _aten.unsqueeze.default, (mask, -2), origin)
        dims = shape_of(mask) or ()
    front = dims[-4:-2]
    if all(same_sizes((size,), (1,)) for size in front):  # one for all heads
        return call(graph, _aten.squeeze.dim, (mask, -3), origin) if len(front) == 2 else mask
    sizes = [*[-1] * max(len(dims) - 4, 0), *groups, -1, -1]
    expanded = call(graph, _aten.expand.default, (mask, sizes), origin)
    return call(graph, _aten.flatten.using_ints, (expanded, -4, -3), origin)


def _is_tiled(mask: Node) -> bool:
    """Whether a mask's rows are one row, repeated."""
    node: Any = mask
    while node.target in (_aten.reshape.default, _aten.clone.default):
        node = node.args[0]
    if node.target not in (_aten.expand.default, _aten.repeat.default):
        return False

    def real(sizes: Any) -> list[Any]:
        return [size for size in sizes if size != 1 or isinstance(size, torch.SymInt)]

    dims = shape_of(node) or ()
    place = len(dims) - 2
    while place > 0 and same_sizes(dims[place : place + 1], (1,)):
        place -= 1
    before = (shape_of(node.args[0]) or ())[place - len(dims) :]
    of_row = len(before) < len(dims) - place or same_sizes(before[:1], (1,))
    return of_row and same_sizes(real(dims), real(shape_of(mask)))


def _merge_scores(softmax: Node, is_step: bool) -> None:
    """Compute scores and probabilities once more, with heads in dimension 1 of four."""
    dims = shape_of(softmax) or ()
    try:
        path = list(path_of(softmax))
    except UnknownFormError:
        return
    rows = is_step and len(dims) == 4 and same_sizes((shape_of(path[0]) or ())[1:2], dims[2:3])
    groups = _groups(softmax, rows=rows)
    shaped = [
        node
        for node in path
        if node.target is _aten.reshape.default
        and len(shape_of(node) or ()) == len(dims)
        and same_sizes((shape_of(node) or ())[1:3], dims[1:3])
    ]
    swapped = [node for node in path if len(shape_of(node) or ()) == len(dims) == 4 and swaps(node, 1, 2)]
    if groups is not None and shaped:
        start, front = shaped[0], [groups[0] * groups[1], *([1] if rows else [])]
        before: Any = start.args[1]
        sizes = [*before[:1], *front, *before[3:]]
        with softmax.graph.inserting_before(start):
            merged = call(softmax.graph, _aten.reshape.default, (start.args[0], sizes), start)
        _follow({start: merged}, lambda mask, node: _merged(mask, groups, rows, node))
    elif swapped:
        _follow({swapped[0]: swapped[0].args[0]}, _swapped)


def _follow(moved: dict[Node, Any], operand: Callable[[Node, Node], Node]) -> None:
    """Copy the operations behind the first scores, the key of `moved`, in the layout of its value, up to its end."""
    (start,) = moved
    graph, dims = start.graph, len(shape_of(start) or ())
    is_swap = swaps(start, 1, 2)
    node = start.next
    while node.op != "output":
        read, node = node, node.next
        source: Any = read.args[0] if read.args else None
        if not any(arg in moved for arg in read.all_input_nodes) or len(shape_of(read) or ()) > dims:
            continue
        if read.target is _aten.reshape.default and not is_swap:
            read.args = (moved[source], *read.args[1:])
        elif swaps(read, 1, 2) and is_swap:
            read.replace_all_uses_with(moved[source])
        elif len(shape_of(read) or ()) == dims and _keeps_dimensions(read):
            with graph.inserting_before(read):

                def as_moved(arg: Node, read: Node = read) -> Node:
                    return moved[arg] if arg in moved else operand(arg, read) if shape_of(arg) else arg

                args: Any = map_arg(read.args, as_moved)
                args = (args[0], -1, *args[2:]) if read.target in _OVER_KEYS else args
                moved[read] = call(graph, read.target, args, read, kwargs=dict(read.kwargs))


def _keeps_dimensions(node: Node) -> bool:
    """Whether a node computes each score from scores in the same place or of the same query."""
    last = len(shape_of(node) or ()) - 1
    over_keys = node.target in _OVER_KEYS and node.args[1:2] in ((-1,), (last,), ([-1],), ([last],))
    return is_pointwise(node) or node.target is _aten.clone.default or over_keys


def _swapped(mask: Node, origin: Node) -> Node:
    """A mask of `[..., q_len, num_heads, kv_len]` with heads first."""
    dims = shape_of(mask) or ()
    if len(dims) > 2:
        return call(origin.graph, _aten.transpose.int, (mask, len(dims) - 3, len(dims) - 2), origin)
    return (
        mask if dims[:-1] in ((), (1,)) else call(origin.graph, _aten.unsqueeze.default, (mask, -2), origin)
    )
