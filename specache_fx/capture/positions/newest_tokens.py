"""`newest_tokens`: graphs that take the ids of the whole sequence, and read the newest of them.

    x = embedding(table, ids) + pos; x = x[:, -1:]       # ids [batch, n]
        -> x = embedding(table, newest) + pos[-1:]       # newest [batch, 1], a further input: ids[:, -1:]

Some decoders are called with all ids in each step, and drop those that the cache stands for behind the embedding. Such
a graph has another shape of ids in each step, and no input that is the token. The slice is moved up to the ids, past
operators that treat tokens one by one, and made before the graph runs. The ids themselves stay an input: an output may
be computed from them.

A graph without such a slice stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.capture.graph.graph_edit import add_placeholder, call, finish
from specache_fx.capture.graph.graph_slices import eliminate_dead_code, mutated_inputs
from specache_fx.capture.graph.graph_utils import (
    END,
    is_pointwise,
    is_static_input,
    newest,
    placeholders,
    same_sizes,
    shape_of,
    value_of,
)

NEWEST_OF = "newest_of"  # in the meta of such an input: the placeholder of all ids
_aten = torch.ops.aten


def _ids(graph: Graph) -> list[Node]:
    """The inputs `[batch, n]` that index an embedding, in whole or their newest, and that nothing writes to."""
    indices = dict[Node, None]()
    for node in graph.nodes:
        if node.target is _aten.embedding.default:
            index = node.args[1]
            indices[index.args[0] if _newest(index) is not None else index] = None
    written = mutated_inputs(graph)
    return [
        node
        for node in indices
        if node.op == "placeholder" and len(shape_of(node) or ()) == 2 and node not in written
        if not is_static_input(node)
    ]


def _newest(node: Node) -> int | None:
    """The number of newest tokens that a slice of `[batch, n, ...]` keeps, of more; None for another node."""
    count = newest(node, 1)
    return None if count is None or same_sizes((shape_of(node.args[0]) or ())[1:2], (count,)) else count


def _moved(graph: Graph, node: Node, dim: int, count: int, origin: Node) -> Node:
    """The newest `count` tokens of a node, computed from the newest of what it reads."""
    dims = shape_of(node) or ()
    args: list[Any] | None = None
    if node.target is _aten.embedding.default and dim < len(dims) - 1:
        args = [node.args[0], _moved(graph, node.args[1], dim, count, origin), *node.args[2:]]  # type: ignore[arg-type]
    elif is_pointwise(node) and _moves_through(node, dim):
        args = [_part(graph, arg, len(dims) - dim, count, origin) for arg in node.args]
    if args is None:
        return call(graph, _aten.slice.Tensor, (node, dim, -count, END), origin)
    return call(graph, node.target, tuple(args), node, kwargs=dict(node.kwargs))


def _moves_through(node: Node, dim: int) -> bool:
    """Whether each tensor that an operator reads has the tokens in their place, or is the same for all."""
    dims = shape_of(node) or ()
    read = (shape_of(arg) or () for arg in node.all_input_nodes)
    sizes = [shape[dim - len(dims)] for shape in read if len(shape) >= len(dims) - dim]
    return all(statically_known_true(size == 1) or statically_known_true(size == dims[dim]) for size in sizes)


def _part(graph: Graph, arg: Any, from_end: int, count: int, origin: Node) -> Any:
    """The part of an argument that an operator which broadcasts reads for the newest tokens."""
    dims = shape_of(arg)
    if dims is None or len(dims) < from_end or statically_known_true(dims[-from_end] == 1):
        return arg
    return _moved(graph, arg, len(dims) - from_end, count, origin)


def _computed_one_by_one(graph: Graph, ids: Node) -> set[Node]:
    """The ids, and what operators that treat tokens one by one compute from them.

    The residual stream is none: what attention adds to it comes from other tokens.
    """
    found, depends = {ids}, {ids}
    for node in graph.nodes:
        read = set(node.all_input_nodes)
        if read & depends:
            depends.add(node)
            by_token = node.target is _aten.embedding.default or is_pointwise(node)
            if by_token and read & depends <= found:
                found.add(node)
    return found


def newest_tokens(gm: GraphModule) -> list[tuple[int, int]]:
    """Have a graph take the newest ids as an input of their own.

    Returns:
        The further inputs: the position of the whole sequence's ids, and how many of the newest are taken of them.
    """
    graph = gm.graph
    inputs = _ids(graph)
    computed = {ids: _computed_one_by_one(graph, ids) for ids in inputs}
    changed = False
    for node in list(graph.nodes):
        kept = _newest(node)
        if kept is None or not any(node.args[0] in nodes - {ids} for ids, nodes in computed.items()):
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(_moved(graph, node.args[0], 1, kept, node))
        changed = True
    if changed:
        eliminate_dead_code(graph)
    taken = []
    for ids in inputs:
        slices = [user for user in ids.users if _newest(user) is not None]
        for count in dict.fromkeys(filter(None, map(_newest, slices))):
            same = [user for user in slices if _newest(user) == count]
            taken_ids = add_placeholder(graph, f"{ids.name}_newest", None)
            taken_ids.meta |= {"val": value_of(same[0]), NEWEST_OF: ids}
            for user in same:
                user.replace_all_uses_with(taken_ids)
                graph.erase_node(user)
            taken.append((placeholders(graph).index(ids), count))
    if changed or taken:
        finish(gm)
    return taken
