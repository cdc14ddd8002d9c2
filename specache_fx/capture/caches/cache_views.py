"""Keys and values of an attention as they are in other forms: the graph's nodes that make one of the other.

side         [batch, num_kv_heads, tokens, channels]
in the model what `runtime/handles/handle_form.py` lists
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.attention.random_numbers import repeated
from specache_fx.capture.attention.run_form import path_of, swapped_in
from specache_fx.capture.caches.id_runs import Operand
from specache_fx.capture.graph.graph_edit import add_placeholder, call
from specache_fx.capture.graph.graph_utils import (
    real_users,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import UnknownFormError
from specache_fx.capture.graph.trace import inline
from specache_fx.runtime.handles.handle_form import (
    PAIR,
    dims_of,
    is_laid_out,
    sides_of,
    steps_from_side,
    steps_to_side,
)
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
_STEPS = {
    "select": _aten.select.int, "unflatten": _aten.unflatten.int, "flatten": _aten.flatten.using_ints,
    "transpose": _aten.transpose.int, "permute": _aten.permute.default,
}  # fmt: skip


def attentions_of(gm: GraphModule) -> Iterator[tuple[Node, list[Operand]]]:
    """The attentions of a graph, with their keys and values."""
    for node in list(gm.graph.nodes):
        if node.target is SDPA:
            sides: Any = node.args[1:3]
            if all(len(shape_of(side) or ()) == 4 for side in sides):
                yield node, [Operand(side, node, (shape_of(side) or ())[1]) for side in sides]
        elif node.target is _aten._softmax.default:
            yield from _spelt_out(node)


def _spelt_out(softmax: Node) -> Iterator[tuple[Node, list[Operand]]]:
    try:
        path = path_of(softmax)
    except UnknownFormError:
        return
    product: Any = path[0]
    weighted = softmax
    while target_name(weighted) != "bmm":
        users = [user for user in real_users(weighted) if user.args and user.args[0] is weighted]
        if not users:
            return
        weighted = users[0]
    scores: Any = shape_of(softmax)
    of_heads = scores[2 if softmax.args[0] in swapped_in(path) else 1] if len(scores) == 4 else None
    heads = of_heads if isinstance(of_heads, int) else None
    keys = Operand(product.args[1], product, heads, transposed=True)
    yield softmax, [keys, Operand(weighted.args[1], weighted, heads)]  # type: ignore[arg-type]


def read_sides(
    attention: Node, operands: Sequence[Operand], sides: Sequence[Node], *, is_tiled: bool = False
) -> None:
    """Have an attention read keys and values that have heads first.

    Args:
        attention: An SDPA, or the softmax of spelt-out attention.
        operands: Its keys and values.
        sides: Those that it is to read.
        is_tiled: Heads of these are repeated one after the other.
    """
    heads = [*sides]
    for i, (operand, side) in enumerate(zip(operands, sides, strict=True)):
        if attention.target is not SDPA or is_tiled:
            spelt = partial(_as_operand, operand=operand, is_tiled=is_tiled)
            heads[i] = inline(spelt, (side,), operand.reader)
    if attention.target is SDPA:
        attention.args = (attention.args[0], *heads, *attention.args[3:7], True)
        return
    for operand, side in zip(operands, heads, strict=True):
        operand.reader.args = (operand.reader.args[0], side, *operand.reader.args[2:])


def _as_operand(side: torch.Tensor, operand: Operand, *, is_tiled: bool) -> torch.Tensor:
    """What an attention reads, of `[batch, num_kv_heads, kv_len, head_dim]`."""
    heads = operand.num_heads or int(value_of(operand.node).shape[0] // side.shape[0])
    whole = side.repeat(1, heads // side.shape[1], 1, 1) if is_tiled else repeated(side, heads)
    whole = whole.mT if operand.transposed else whole
    return whole if operand.reader.target is SDPA else whole.flatten(0, 1)


def heads_first_of(graph: Graph, node: Node, form: str, num_kv_heads: int, side: int, origin: Node) -> Node:
    """Insert a side of a node in another form at the graph's insertion point."""
    for name, args in steps_to_side(form, num_kv_heads, side):
        node = call(graph, _STEPS[name], (node, *args), origin)
    return node


def as_in_model(graph: Graph, sides: Sequence[Node], form: str, origin: Node) -> Node:
    """Insert what the model has of sides at the graph's insertion point."""
    nodes = list(sides)
    for name, args in steps_from_side(form):
        nodes = [call(graph, _STEPS[name], (node, *args), origin) for node in nodes]
    if len(nodes) == 1:
        return nodes[0]
    return call(graph, _aten.stack.default, (nodes, dims_of(form).index((PAIR,))), origin)


def sides_in(graph: Graph, node: Node, form: str, num_kv_heads: int) -> list[Node]:
    """Have an input come in with heads first: itself, and one more for the values of a pair.

    What reads it then reads what the model has of it. Open sizes are read of the sides.
    """
    value = value_of(node)
    sides = sides_of(value, form, num_kv_heads, is_handle=is_laid_out(value))
    nodes = [node, *(add_placeholder(graph, f"{node.name}_values", None) for _ in sides[1:])]
    users = list(node.users)
    for each, side in zip(nodes, sides, strict=True):
        each.meta = {**node.meta, "val": side}
    read_sizes(node, [node], value.shape)
    first = next(each for each in graph.nodes if each.op != "placeholder")
    with graph.inserting_before(first):
        whole = as_in_model(graph, nodes, form, node)
    for user in users:
        user.replace_input_with(node, whole)
    return nodes


def read_sizes(node: Node, sides: Sequence[Node], shape: Sequence[Any]) -> None:
    """Have what reads sizes of a node read those of sides that are the same."""
    graph = node.graph
    for user in [user for user in node.users if user.target is _aten.sym_size.int]:
        size = shape[user.args[1]]  # type: ignore[index]
        same = (
            (side, dim) for side in sides for dim in (2, 0) if same_sizes([size], [value_of(side).shape[dim]])
        )
        if (found := next(same, None)) is not None:
            with graph.inserting_before(user):
                user.replace_all_uses_with(call(graph, _aten.sym_size.int, found, user))
            graph.erase_node(user)
