"""Attention that is spelt out, understood by running it: no operator between its two products is known by name.

    p = bmm(q, k^T)              s = S(p): what goes into the softmax
    out = F(p, v, ...)           F: all that is computed from p, up to what the rest of the graph reads

    mask                         S(0): the same operators, with a zero for the product
    scale, softcap, sinks        by runs (`prove_form.py`), which prove that F is the normal form of q, k, v and mask

A refusal names the first operator behind which scores or probabilities are none of the normal form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from specache_fx.capture.attention.prove_form import Form, SpeltOut, prove
from specache_fx.capture.attention.random_numbers import Numbers
from specache_fx.capture.graph.graph_edit import CallsOnce
from specache_fx.capture.graph.graph_slices import ancestors, between, constant_of, draws_random_numbers
from specache_fx.capture.graph.graph_utils import (
    concatenated,
    described,
    is_pointwise,
    order_of,
    reads_shape_only,
    real_users,
    same_sizes,
    shape_of,
    swaps,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import LEAVE, UnknownFormError
from specache_fx.capture.graph.trace import inline
from specache_fx.capture.program import AttentionCore

_aten = torch.ops.aten
PRODUCTS = {"bmm", "mm", "addmm"}  # no scores lie behind these
# The row is that of the first operand: no softmax reads the order of others, and sinks are a column for themselves.
_SAME_ROW = {"reshape", "clone", "_to_copy", "cat"}
_OF_ROW = {"max", "amax", "getitem"}  # a statistic of each row, which no softmax notices

# Scores of a prompt's proof, at most; a decode step's is always made.
MOST_SCORES = 2**20


def from_softmax(gm: GraphModule, softmax: Node, outputs: set[Node], calls: CallsOnce) -> AttentionCore:
    """Read the attention around a softmax, and prove it.

    The model's own operations stay where they are. A prompt's that is too long for its proof is not run: it has its
    parts and its mask, and no scale.

    Args:
        gm: The graph.
        softmax: The softmax.
        outputs: What the graph returns: the walk to the cached keys and values ends there.
        calls: Inserts the mask before the softmax.

    Raises:
        UnknownFormError: Names the operation that has no place in the normal form.
    """
    dims = len(shape_of(softmax) or ())
    if dims not in (3, 4, 5) or softmax.args[1] not in (-1, dims - 1):
        raise UnknownFormError(softmax, "is not over the last of 3 to 5 dimensions")
    path = path_of(softmax)
    cone, product = _cone_of(softmax, path[0], outputs), path[0]
    weighted = next(node for node in cone[cone.index(softmax) :] if target_name(node) == "bmm")
    query, query_path = side_of_product(product.args[0], outputs, transposed=False, is_query=True)
    key, key_path = side_of_product(product.args[1], outputs, transposed=True)
    value, value_path = side_of_product(weighted.args[1], outputs, transposed=False)
    layout = _layout_of(softmax, path, query, (shape_of(key) or ())[1])
    factors = [node for node in cone[1:] if _is_factor(gm, node)]
    mask = _mask_of(softmax, path, layout, calls)
    form = Form(1.0)
    if _may_be_proved(softmax) and 0 not in (
        shape_of(softmax) or ()
    ):  # `match_attention` refuses one of none
        sides, num_heads = [query, key, value], layout.num_heads
        form = prove(SpeltOut(gm, softmax, path, layout.swapped, cone, sides, num_heads, factors, mask))
    inner, out = {*cone, *query_path, *key_path, *value_path}, cone[-1]
    users = real_users(out)
    if len(users) == 1 and _splits_heads(users[0], layout):
        inner, out = {*inner, users[0]}, users[0]
    problem = None
    for node in (*key_path, *value_path):  # handles have no numbers
        if (other := next((user for user in real_users(node) if user not in inner), None)) is not None:
            problem = f"{described(other)} reads its `{node.name}`", f"{LEAVE}."
    query = _query_of(query, factors, softmax, layout, calls)
    core = AttentionCore(out, query, key, value, mask, *form, inner=frozenset(inner), problem=problem)
    return in_groups(core, calls)


def mask_of(softmax: Node, num_kv_heads: int, outputs: set[Node], calls: CallsOnce) -> Node | None:
    """The mask of spelt-out attention alone, see `from_softmax`; None where nothing is hidden or added."""
    path = path_of(softmax)
    query, _ = side_of_product(path[0].args[0], outputs, transposed=False, is_query=True)
    return _mask_of(softmax, path, _layout_of(softmax, path, query, num_kv_heads), calls)


def _may_be_proved(softmax: Node) -> bool:
    """Whether an attention, open sizes given small values, has few scores, or is of one query."""
    numbers, sizes = Numbers(softmax), shape_of(softmax) or ()
    return sizes[-2:-1] == (1,) or math.prod(map(numbers.integer, sizes)) <= MOST_SCORES


class _Layout(NamedTuple):
    """The dimensions of scores.

    Attributes:
        num_heads: Query heads.
        row: Dimension of the queries, counted from the end; None where heads are the rows of a single one.
        groups: KV heads and groups of each, where these are two dimensions.
        swapped: The nodes before the softmax that are `[batch, q_len, num_heads, kv_len]`.
    """

    num_heads: Any
    row: int | None
    groups: tuple[int, int] | None
    swapped: set[Node]


def _layout_of(softmax: Node, path: Sequence[Node], query: Node, kv_heads: int) -> _Layout:
    scores, product = shape_of(softmax) or (), shape_of(path[0]) or ()
    swapped, queries = swapped_in(path), shape_of(query) or ()
    if softmax.all_input_nodes[0] in swapped:
        return _Layout(scores[2], -3, None, swapped)
    as_rows = len(scores) == 4 and same_sizes(product[1:2], scores[2:3]) and scores[2] != 1
    if len(scores) == 5 or (as_rows and isinstance(scores[2], int) and is_of_one_token(softmax.graph)):
        return _Layout(scores[1] * scores[2], None if as_rows else -2, scores[1:3], swapped)
    of_scores = len(scores) == 4 and isinstance(scores[1], int) and scores[1] % kv_heads == 0
    # A single query of three dimensions is of all heads.
    heads = scores[1] if of_scores else queries[1] if len(queries) == 4 else kv_heads
    return _Layout(heads, -2, None, swapped)


def _query_of(query: Node, factors: Sequence[Node], softmax: Node, layout: _Layout, calls: CallsOnce) -> Node:
    """The queries `[batch, num_heads, q_len, key_dim]`, multiplied by numbers that are computed in the graph."""
    sizes = shape_of(query) or ()
    if len(sizes) == 3 and layout.groups is None:
        query = calls.call(softmax, _aten.unflatten.int, query, 0, (-1, layout.num_heads))
    elif len(sizes) == 5:
        query = calls.call(softmax, _aten.flatten.using_ints, query, 1, 2)
    elif len(sizes) == 3 or sizes[1] != layout.num_heads:
        tokens = 1 if layout.row is None else calls.size(softmax, softmax.all_input_nodes[0], layout.row)
        query = calls.call(softmax, _aten.reshape.default, query, [-1, layout.num_heads, tokens, sizes[-1]])
    for node in factors:
        query = calls.call(softmax, node.target, query, node.args[1])
    return query


def swapped_in(path: Sequence[Node]) -> set[Node]:
    """The scores of a path, see `path_of`, that are `[batch, q_len, num_heads, kv_len]`."""
    found = set[Node]()
    for node in path[1:]:
        swap = len(shape_of(node) or ()) == 4 and swaps(node, 1, 2)
        if swap == found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def is_of_one_token(graph: Graph) -> bool:
    """Whether a call appends one token to what it returns, or embeds one."""
    outputs = graph.output_node().all_input_nodes
    for node in outputs:
        parts, dim = concatenated(node) or ([], 0)
        if len(parts) == 2 and parts[0].op == "placeholder":
            return same_sizes((shape_of(parts[1]) or ())[dim : dim + 1], (1,))
    embedded = (shape_of(node.args[1]) or () for node in graph.nodes if target_name(node) == "embedding")
    return any(dims[-1:] == (1,) for dims in embedded)


def path_of(softmax: Node) -> list[Node]:
    """The product of queries and keys, and in order what leads from it to the softmax.

    Raises:
        UnknownFormError: If the scores are not computed from one product.
    """
    nodes = softmax.graph.nodes
    sizes = (node for node in nodes if reads_shape_only(node))  # rotary embeddings may be products, too
    ends = [*(node for node in nodes if target_name(node) in PRODUCTS), *sizes]
    behind = ancestors(softmax.all_input_nodes, ends)
    products = [node for node in nodes if node in behind and target_name(node) == "bmm"]
    if len(products) > 1:
        raise UnknownFormError(products[1], "is another product in its scores")
    if not products:
        raise UnknownFormError(softmax.all_input_nodes[0], "is no product of queries and keys (a matmul)")
    return between(products, softmax.all_input_nodes, ends)


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


def _mask_of(softmax: Node, path: Sequence[Node], layout: _Layout, calls: CallsOnce) -> Node | None:
    """S(0) in the graph: the operators of the scores, with a zero for the product."""
    value, ones = value_of(softmax), [1] * max(len(shape_of(softmax) or ()), 4)
    zero = calls.call(softmax, _aten.full.default, ones, 0.0, dtype=value.dtype, device=value.device)

    def operand(reader: Node, arg: Node) -> Node:
        dims = shape_of(arg) or ()
        if arg not in known and len(dims) == len(shape_of(reader) or ()) == 3 and dims[0] != 1:
            return calls.call(softmax, _aten.unflatten.int, arg, 0, (-1, layout.num_heads))  # batch and heads
        if known.get(arg) is zero and not is_pointwise(reader):
            return calls.call(
                softmax, _aten.expand.default, zero, [*ones[1:], calls.size(softmax, path[0], 2)]
            )
        return known.get(arg, arg)

    known = {path[0]: zero}
    for node in path[1:]:
        first: Any = node.args[0]
        first = first[0] if isinstance(first, (list, tuple)) else first
        read = [arg for arg in node.all_input_nodes if shape_of(arg) != ()]
        if target_name(node) in _SAME_ROW and first in known:
            known[node] = known[first]
        elif target_name(node) in _OF_ROW or (
            (is_pointwise(node) or order_of(node)) and all(known.get(arg) is zero for arg in read)
        ):
            known[node] = zero  # no softmax notices; or it is of the product alone
        else:
            args = map_arg(node.args, functools.partial(operand, node))
            known[node] = calls.call(softmax, node.target, *args, **node.kwargs)
    mask = known[softmax.all_input_nodes[0]]
    if mask is zero:
        return None
    if softmax.all_input_nodes[0] in layout.swapped:
        mask = calls.call(softmax, _aten.transpose.int, mask, 1, 2)
    return (
        mask if layout.groups is None else with_heads(mask, layout.groups, layout.row is None, calls, softmax)
    )


def with_heads(
    mask: Node, groups: tuple[int, int], of_one_token: bool, calls: CallsOnce, attention: Node
) -> Node:
    """A mask with one dimension for the heads where it has two, KV heads and groups."""
    if of_one_token and len(shape_of(mask) or ()) > 1:
        mask = calls.call(attention, _aten.unsqueeze.default, mask, -2)
    dims = shape_of(mask) or ()
    front = dims[-4:-2]
    if same_sizes(front, (1,) * len(front)):  # one for all heads
        return calls.call(attention, _aten.squeeze.dim, mask, -3) if len(front) == 2 else mask
    sizes = [*[-1] * max(len(dims) - 4, 0), *groups, -1, -1]
    whole = calls.call(attention, _aten.expand.default, mask, sizes)
    return calls.call(attention, _aten.flatten.using_ints, whole, -4, -3)


def turned(x: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    """Heads, of these sizes, in the order of the other size first."""
    return x.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)


def in_groups(core: AttentionCore, calls: CallsOnce) -> AttentionCore:
    """Query heads that read the same KV head one after the other, where KV heads are repeated in turn (`repeat`)."""
    sides: Any = (core.key, core.value)
    times = [side.args[1] if side.target is _aten.repeat.default else [] for side in sides]
    read_elsewhere = any(user not in core.inner for side in sides for user in real_users(side))
    if read_elsewhere or any(each[:1] + each[2:] != [1, 1, 1] for each in times):
        return core
    key, value = (side.args[0] for side in sides)
    heads, num_kv_heads = (int((shape_of(node) or ())[1]) for node in (core.query, key))
    # Fewer copies than queries a head are grouped by SDPA once more, in the other order.
    if any(each[1] != heads // num_kv_heads for each in times):
        return core

    def regrouped(node: Any, place: int) -> Any:
        dims = shape_of(node) or ()
        if not same_sizes(dims[place : place + 1 or None], (heads,)):  # of two dimensions: none
            return node
        sizes = (heads // num_kv_heads, num_kv_heads)
        turn = functools.partial(turned, dim=len(dims) + place, sizes=sizes)
        return inline(turn, (node,), core.node, calls)

    query, mask, sinks = regrouped(core.query, -3), regrouped(core.mask, -3), regrouped(core.sinks, -1)
    inner = core.inner | {*sides}
    return replace(
        core, query=query, key=key, value=value, mask=mask, sinks=sinks, is_turned=True, inner=inner
    )


def in_model_order(out: Node, num_kv_heads: int, before: Node) -> Node:
    """Insert the result of an attention that `is_turned` with its heads in the model's order."""
    sizes = num_kv_heads, (shape_of(out) or ())[1] // num_kv_heads
    return inline(functools.partial(turned, dim=1, sizes=sizes), (out,), before)


def _is_factor(gm: GraphModule, node: Node) -> bool:
    """Whether a node multiplies by a number that is computed in the graph, `self.scale = np.sqrt(head_dim)`."""
    if target_name(node) not in ("mul", "div") or len(node.args) != 2:
        return False
    factor = node.args[1]
    return isinstance(factor, Node) and shape_of(factor) == () and constant_of(gm, factor) is None


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


def _splits_heads(node: Node, layout: _Layout) -> bool:
    """Whether a node makes `[batch, num_heads, q_len, dim]`, or that with groups, of a product's result."""
    before, dims = shape_of(node.all_input_nodes[0]) or (), shape_of(node) or ()
    if layout.groups is not None and len(dims) > 4:
        return target_name(node) == "reshape" and same_sizes(dims[1:3], layout.groups)
    whole = len(dims) == 4 and same_sizes((layout.num_heads, *before[1:]), dims[1:])
    return target_name(node) == "reshape" and whole
