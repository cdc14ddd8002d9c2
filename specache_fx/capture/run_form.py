"""Attention that is spelt out, understood by running it: no operator between its two products is known by name.

    p = bmm(q, k^T)              s = S(p): what goes into the softmax
    out = F(p, v, ...)           F: all that is computed from p, up to what the rest of the graph reads

    mask                         S(0): the same operators, on rows, with a zero for the product
    scale, softcap, sinks        by runs (`prove_form.py`), which prove that F is the normal form of q, k, v and mask

A refusal names the first operator behind which scores or probabilities are none of the normal form.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from specache_fx.capture.graph_slices import ancestors, constant_of, draws_random_numbers
from specache_fx.capture.graph_utils import (
    is_pointwise,
    reads_shape_only,
    real_users,
    same_sizes,
    shape_of,
    swaps,
    target_name,
    value_of,
)
from specache_fx.capture.mask_rows import MaskRowBuilder, UnknownFormError
from specache_fx.capture.program import AttentionCore
from specache_fx.capture.prove_form import Form, SpeltOut, prove

_aten = torch.ops.aten
PRODUCTS = {"bmm", "mm", "addmm"}  # no scores lie behind these
# The row is that of the first operand: no softmax reads the order of others, and sinks are a column for themselves.
_SAME_ROW = {"reshape", "clone", "_to_copy", "cat"}
_OF_ROW = {"max", "amax", "getitem"}  # a statistic of each row, which no softmax notices


def read_form(
    gm: GraphModule, softmax: Node, outputs: set[Node], rows: MaskRowBuilder, *, proved: bool
) -> AttentionCore:
    """Read the attention around a softmax, and prove it.

    Args:
        gm: The graph.
        softmax: The softmax.
        outputs: What the graph returns: the walk to the cached keys and values ends there.
        rows: Inserts masks before the softmax.
        proved: Run it. Else it has its parts and its mask, and no scale: its operations stay the model's.

    Raises:
        UnknownFormError: Names the operation that has no place in the normal form.
    """
    dims = len(shape_of(softmax) or ())
    if dims not in (3, 4) or softmax.args[1] not in (-1, dims - 1):
        raise UnknownFormError(softmax, "is not over the last of 3 or 4 dimensions")
    path = path_of(softmax)
    cone, product = _cone_of(softmax, path[0], outputs), path[0]
    weighted = next(node for node in cone[cone.index(softmax) :] if target_name(node) == "bmm")
    query, query_path = side_of_product(product.args[0], outputs, transposed=False, is_query=True)
    key, key_path = side_of_product(product.args[1], outputs, transposed=True)
    value, value_path = side_of_product(weighted.args[1], outputs, transposed=False)
    sizes = shape_of(query) or ()
    num_heads = _heads_of(softmax, sizes, key)
    factors = [node for node in cone[1:] if _is_factor(gm, node)]
    mask = _mask_of(softmax, path, num_heads, rows)
    form = Form(1.0)
    if proved:
        sides = [query, key, value]
        form = prove(SpeltOut(gm, softmax, path, cone, sides, num_heads, factors, mask, rows.newest))
    inner, out = {*cone, *query_path, *key_path, *value_path}, cone[-1]
    users = real_users(out)
    if len(users) == 1 and _splits_heads(users[0], num_heads):
        inner, out = {*inner, users[0]}, users[0]
    if len(sizes) == 3:
        query = rows.call(softmax, _aten.unflatten.int, query, 0, (-1, num_heads))
    elif len(sizes) == 5:
        query = rows.call(softmax, _aten.flatten.using_ints, query, 1, 2)
    elif sizes[1] != num_heads:
        tokens = rows.size(softmax, softmax.all_input_nodes[0], 2)
        query = rows.call(softmax, _aten.reshape.default, query, [-1, num_heads, tokens, sizes[3]])
    for node in factors:
        query = rows.call(softmax, node.target, query, node.args[1])
    return AttentionCore(out, query, key, value, mask, *form, frozenset(inner))


def path_of(softmax: Node) -> list[Node]:
    """The product of queries and keys, and in order what leads from it to the softmax.

    Raises:
        UnknownFormError: If the scores are not computed from one product.
    """
    nodes = softmax.graph.nodes
    sizes = (node for node in nodes if reads_shape_only(node))  # rotary embeddings may be products, too
    behind = ancestors(
        softmax.all_input_nodes, (*(node for node in nodes if target_name(node) in PRODUCTS), *sizes)
    )
    products = [node for node in nodes if node in behind and target_name(node) == "bmm"]
    if len(products) > 1:
        raise UnknownFormError(products[1], "is another product in its scores")
    if not products:
        raise UnknownFormError(softmax.all_input_nodes[0], "is no product of queries and keys (a matmul)")
    path = dict.fromkeys(products)
    for node in nodes:
        if node in behind and not reads_shape_only(node) and any(arg in path for arg in node.all_input_nodes):
            path[node] = None
    return list(path)


def _cone_of(softmax: Node, product: Node, outputs: set[Node]) -> list[Node]:
    """The product, and what is computed from it up to the result that all else reads, the weighted values or a gate."""
    inside, is_weighted, node = dict.fromkeys([product]), False, product.next
    unread = {product}  # whose readers are not all inside
    while node.op != "output":
        if any(arg in inside for arg in node.all_input_nodes) and not reads_shape_only(node):
            if draws_random_numbers(node):
                raise UnknownFormError(node, "is on: call model.eval() first")
            inside[node] = None
            is_weighted |= target_name(node) == "bmm" and softmax in inside
            unread = {each for each in (*unread, node) if not inside.keys() >= set(real_users(each))}
            if is_weighted and unread <= {node}:
                return list(inside)
        node = node.next
    weighted = [node for node in inside if target_name(node) == "bmm"][1:2]
    weigh = ancestors(weighted, [softmax]) & inside.keys() | {softmax}
    readers = (user for each in inside if each in weigh for user in real_users(each) if user not in weigh)
    reader = next(readers, softmax)
    returned = reader.op == "output" or not outputs.isdisjoint((reader, *reader.all_input_nodes))
    why = ": call the model with output_attentions=False" if returned else ""
    raise UnknownFormError(softmax if reader.op == "output" else reader, f"reads its probabilities{why}")


def _mask_of(softmax: Node, path: Sequence[Node], num_heads: Any, rows: MaskRowBuilder) -> Node | None:
    """S(0) in the graph: the operators of the scores, on rows of what they read."""

    def row(operand: Node, reader: Node) -> Node:
        dims = shape_of(operand) or ()
        if rows.newest and len(dims) > 1:
            operand = rows.call(softmax, _aten.slice.Tensor, operand, len(dims) - 2, -1)
        if len(dims) == len(shape_of(reader) or ()) == 3 and dims[0] != 1:  # batch and heads are one
            operand = rows.call(softmax, _aten.unflatten.int, operand, 0, (-1, num_heads))
        return operand

    value = value_of(softmax)
    zero = rows.call(softmax, _aten.full.default, [1, 1, 1, 1], 0.0, dtype=value.dtype, device=value.device)

    def operand(reader: Node, arg: Node) -> Node:
        if arg not in known:
            return row(arg, reader)
        if known[arg] is zero and not is_pointwise(reader):
            return rows.call(softmax, _aten.expand.default, zero, [1, 1, 1, rows.size(softmax, path[0], 2)])
        return known[arg]

    known = {path[0]: zero}
    for node in path[1:]:
        first: Any = node.args[0]
        first = first[0] if isinstance(first, (list, tuple)) else first
        read = [arg for arg in node.all_input_nodes if shape_of(arg) != ()]
        if target_name(node) in _SAME_ROW and first in known:
            known[node] = known[first]
        elif target_name(node) in _OF_ROW or (
            is_pointwise(node) and all(known.get(arg) is zero for arg in read)
        ):
            known[node] = zero  # no softmax notices; or it is of the product alone
        else:
            args = map_arg(node.args, functools.partial(operand, node))
            known[node] = rows.call(softmax, node.target, *args, **node.kwargs)
    mask = known[softmax.all_input_nodes[0]]
    return None if mask is zero else mask


def _is_factor(gm: GraphModule, node: Node) -> bool:
    """Whether a node multiplies by a number that is computed in the graph, `self.scale = np.sqrt(head_dim)`."""
    if target_name(node) not in ("mul", "div") or len(node.args) != 2:
        return False
    factor = node.args[1]
    return isinstance(factor, Node) and shape_of(factor) == () and constant_of(gm, factor) is None


def _heads_of(softmax: Node, query: Sequence[Any], key: Node) -> Any:
    """Query heads: of the scores where rows of the queries are heads, too (`capture/grouped_heads.py`)."""
    scores, kv_heads = shape_of(softmax) or (), (shape_of(key) or ())[1]
    if len(scores) == 4 and isinstance(scores[1], int) and scores[1] % kv_heads == 0:
        return scores[1]
    return query[1] if len(query) == 4 else kv_heads  # a single one is of all queries


def side_of_product(
    node: Any, outputs: set[Node], *, transposed: bool, is_query: bool = False
) -> tuple[Node, list[Node]]:
    """The source of a product's operand, `[batch, num_heads, tokens, dim]`, and the nodes in between.

    The walk ends at `outputs`. A query may also have three dimensions.
    """
    path = list[Node]()
    while True:
        dims, name = shape_of(node) or (), target_name(node)
        before = next(map(shape_of, node.all_input_nodes), None) or ()
        same = name in ("_to_copy", "clone")
        same |= name == "reshape" and len(dims) == 3 and same_sizes(before[-1:], dims[-1:])
        same |= name == "expand" and len(dims) == 4 and same_sizes(before[1:2], (1,))
        same |= name == "expand" and len(dims) == 5 and same_sizes(before[2:3], (1,))
        same |= name == "unsqueeze" and len(dims) == 5 and node.args[1] in (2, -3)
        swap = (transposed or len(dims) == 3) and swaps(node, -1, -2)
        if node in outputs or not (same or swap):
            break
        path.append(node)
        node, transposed = node.args[0], transposed ^ swap
    whole = len(dims) == 4 and isinstance(dims[1], int)
    if transposed or not (whole or (is_query and 3 <= len(dims) <= 5)):
        keys = "is no [..., kv_len, dim]: cache it as that, and transpose it where it is multiplied"
        raise UnknownFormError(node, "is no [..., q_len, dim]" if is_query else keys)
    return node, path


def _splits_heads(node: Node, num_heads: Any) -> bool:
    """Whether a node makes `[batch, num_heads, q_len, dim]` of a product's result."""
    before, dims = shape_of(node.all_input_nodes[0]) or (), shape_of(node) or ()
    return (
        target_name(node) == "reshape" and len(dims) == 4 and same_sizes((num_heads, *before[1:]), dims[1:])
    )
