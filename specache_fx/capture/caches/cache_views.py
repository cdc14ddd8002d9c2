"""Keys and values of an attention as they are in other forms: the graph's nodes that make one of the other.

side         [batch, num_kv_heads, tokens, channels]
in the model what `runtime/handle_form.py` lists
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.attention.normalize_attention import SDPA
from specache_fx.capture.attention.random_numbers import repeated
from specache_fx.capture.attention.run_form import path_of, swapped_in
from specache_fx.capture.caches.id_runs import Operand
from specache_fx.capture.graph.graph_edit import add_placeholder, call
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    is_pointwise,
    real_users,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.trace import inline
from specache_fx.capture.positions.mask_rows import UnknownFormError
from specache_fx.runtime.handle_form import (
    PAIR,
    dims_of,
    is_laid_out,
    sides_of,
    steps_from_side,
    steps_to_side,
)

_aten = torch.ops.aten
_STEPS = {
    "select": _aten.select.int, "unflatten": _aten.unflatten.int, "flatten": _aten.flatten.using_ints,
    "transpose": _aten.transpose.int, "permute": _aten.permute.default,
}  # fmt: skip
_SAME_HEADS = {"_softmax", "reshape", "clone", "_to_copy"}


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
    heads = _num_heads(softmax, product, swapped=softmax.args[0] in swapped_in(path))
    keys = Operand(product.args[1], product, heads, transposed=True)
    yield softmax, [keys, Operand(weighted.args[1], weighted, heads)]  # type: ignore[arg-type]


def _num_heads(softmax: Node, product: Node, *, swapped: bool) -> int | None:
    """Heads of a product's operands; None where they can't be told."""
    node: Any = softmax
    if len(shape_of(softmax) or ()) == 3:
        node = product.args[0]
        while len(shape_of(node) or ()) == 3 and target_name(node) in (
            "reshape",
            "clone",
            "expand",
            "mul",
            "div",
        ):
            node = node.args[0]
    dims = shape_of(node) or ()
    heads = dims[2 if swapped else 1] if len(dims) > 3 else None
    return heads if isinstance(heads, int) else None


def read_sides(
    attention: Node, operands: Sequence[Operand], sides: Sequence[Node], *, is_tiled: bool = False
) -> None:
    """Have an attention read keys and values that have heads first.

    Args:
        attention: An SDPA, or the softmax of spelt-out attention.
        operands: Its keys and values.
        sides: Those that it is to read.
        is_tiled: Heads of these are repeated one after the other: the queries are put into groups.
    """
    graph = attention.graph
    if attention.target is SDPA:
        if is_tiled:
            group_queries(attention, (shape_of(sides[0]) or ())[1])
        attention.args = (attention.args[0], *sides, *attention.args[3:7], True)
        return
    for operand, side in zip(operands, sides, strict=True):
        with graph.inserting_before(operand.reader):
            spelt = inline(graph, partial(_as_operand, operand=operand), (side,), operand.node)
        operand.reader.args = (operand.reader.args[0], spelt, *operand.reader.args[2:])
    if is_tiled:
        batch, num_kv_heads = (shape_of(sides[0]) or ())[:2]
        group_queries(operands[0].reader, num_kv_heads, batch, operands[1].reader)


def may_be_regrouped(attention: Node) -> bool:
    """Whether query heads may change places: all between the products of spelt-out attention treats them the same."""
    if attention.target is SDPA:
        return True
    product, *path = path_of(attention)
    inside, node = [*path], attention
    while target_name(node) != "bmm":
        inside.append(node)
        node = next(user for user in real_users(node) if user.args and user.args[0] is node)
    heads = (shape_of(attention) or ())[1:2]
    whole = len(shape_of(attention) or ()) == 4 and isinstance(heads[0], int)

    def keeps_heads(node: Node) -> bool:
        dims, rows = shape_of(node) or (), (shape_of(product) or ())[:1]
        apart = (
            same_sizes(dims[1:2], heads) if len(dims) == 4 else len(dims) == 3 and same_sizes(dims[:1], rows)
        )
        return apart and (is_pointwise(node) or target_name(node) in _SAME_HEADS)

    read = {arg for each in inside for arg in each.all_input_nodes} - {product, *inside}
    dims_read = [shape_of(arg) or () for arg in read]
    of_all = all(len(dims) < 3 or (len(dims) == 4 and same_sizes(dims[1:2], (1,))) for dims in dims_read)
    return whole and of_all and all(map(keeps_heads, inside))


def group_queries(reader: Node, num_kv_heads: int, batch: int = 1, last: Node | None = None) -> None:
    """Have the query heads that read the same KV head follow each other, and those of the result in the old order.

    Args:
        reader: What reads the queries, an SDPA or a product.
        num_kv_heads: KV heads.
        batch: Number of sequences, where these are one dimension with the heads.
        last: What has the result; the reader itself where None.
    """
    graph, last, (query, key, *rest) = reader.graph, last or reader, reader.args
    groups = int((shape_of(query) or ())[-3] // (batch * num_kv_heads))

    def turned(node: Any, *sizes: int) -> Node:
        return inline(graph, partial(_turned, sizes=sizes), (node,), reader)

    with graph.inserting_before(reader):
        query = turned(query, groups, num_kv_heads)
        if reader.target is SDPA and (shape_of(rest[1]) or ())[-3:-2] not in ((), (1,)):
            rest[1] = turned(rest[1], groups, num_kv_heads)
    reader.args = (query, key, *rest)
    with graph.inserting_before(last.next):
        out = turned(last, num_kv_heads, groups)
    last.replace_all_uses_with(out, delete_user_cb=lambda user: user not in ancestors([out]))


def _turned(heads: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The heads of `[..., (batch) heads, tokens, channels]`, of two sizes, in the order of the second one."""
    dim = heads.dim() - 3
    return heads.unflatten(dim, (-1, *sizes)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)


def _as_operand(side: torch.Tensor, operand: Operand) -> torch.Tensor:
    """A product's operand, of `[batch, num_kv_heads, kv_len, head_dim]`."""
    whole = repeated(side, operand.num_heads or side.shape[1])
    return (whole.mT if operand.transposed else whole).flatten(0, 1)


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
