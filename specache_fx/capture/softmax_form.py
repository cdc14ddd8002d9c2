"""Reads attention that is spelt out as products and a softmax into the parts of the normal form.

    p = bmm(q, k^T)                          with batch and heads as one; baddbmm adds a bias
    s = softcap * tanh(scale * p / softcap)  either may be missing
    s = s + mask                             any number of masks and biases; masked_fill and where with a huge negative
    w = softmax(cat([s, sinks]))[..., :-1]   with or without sinks; the maximum may be subtracted first
    w = masked_fill(w, hidden, 0)            of the same mask as before; where(isnan(w), 0, w)
    out = bmm(w, v)                          sinks may be a gate behind it

A gate is `out * sigmoid(logsumexp(s, -1) - sinks)`: the same, since sigmoid(log(sum e^s) - b) = sum e^s / (sum e^s +
e^b) (granite_swa). Changes of dtype and of shape don't matter. Every other operation on the way is an
`UnknownFormError` that names it. What was read is a guess until it is proved (`capture/prove_form.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_slices import ancestors, constant_of
from specache_fx.capture.graph_utils import (
    cut_of,
    reads_shape_only,
    real_users,
    same_sizes,
    shape_of,
    swaps,
    target_name,
)
from specache_fx.capture.program import AttentionCore
from specache_fx.capture.score_chain import LAYOUTS, PRODUCTS, Rows, Scores, UnknownFormError

_aten = torch.ops.aten
_ENDS = PRODUCTS | {"mm", "addmm"}  # no scores lie behind these


def read_form(gm: GraphModule, softmax: Node, outputs: set[Node], rows: Rows) -> AttentionCore:
    """Read the attention around a softmax.

    Args:
        gm: The graph.
        softmax: The softmax.
        outputs: What the graph returns: the walk to the cached keys and values ends there.
        rows: Inserts masks before the softmax.

    Raises:
        UnknownFormError: Names the first operation that has no place in the normal form.
    """
    dims = len(shape_of(softmax) or ())
    if dims not in (3, 4) or softmax.args[1] not in (-1, dims - 1):
        raise UnknownFormError(softmax, "is not over the last of 3 or 4 dimensions")
    path = path_of(softmax)
    product = next(iter(path))
    after, output = _weighted_values(gm, softmax, outputs, path)
    *biases, query, key = product.args
    query, query_path = _side(query, outputs, transposed=False, is_query=True)
    key, key_path = _side(key, outputs, transposed=True)
    value, value_path = _side(output.args[1], outputs, transposed=False)
    sizes = shape_of(query) or ()
    num_heads = _heads_of(softmax, sizes, key)
    alpha, beta = (constant_of(gm, product.kwargs.get(name, 1.0)) for name in ("alpha", "beta"))
    if alpha is None or beta is None:
        raise UnknownFormError(product)
    scores = Scores(gm, softmax, num_heads, rows, path, alpha)
    if biases and beta:
        scores.add(biases[0], product, beta)
    for node in list(path)[1:]:
        scores.apply(node)
    if any(_drops_last(node) for node in after) != (scores.sinks is not None):
        raise UnknownFormError(softmax, "is over columns that are neither keys nor one sink a head")
    inner = {*path, softmax, *after, output, *query_path, *key_path, *value_path, *scores.inner}
    users = real_users(output)
    if len(users) == 1 and _splits_heads(users[0], num_heads):
        inner, output = {*inner, users[0]}, users[0]
        users = real_users(output)
    if scores.sinks is None and len(users) == 1 and target_name(users[0]) == "mul":
        sinks, gate = scores.sinks_behind(users, {*path, output})
        if any(read in path for node in gate for read in node.all_input_nodes):
            inner, output, scores.sinks = inner | gate, users[0], sinks
    if len(sizes) == 3:
        query = rows.call(softmax, _aten.unflatten.int, query, 0, (-1, num_heads))
    elif len(sizes) == 5:
        query = rows.call(softmax, _aten.flatten.using_ints, query, 1, 2)
    elif sizes[1] != num_heads:
        tokens = rows.size(softmax, softmax.all_input_nodes[0], 2)
        query = rows.call(softmax, _aten.reshape.default, query, [-1, num_heads, tokens, sizes[3]])
    for target, factor in scores.factors:
        query = rows.call(softmax, target, query, factor)
    return AttentionCore(
        output, query, key, value, scores.mask, scores.scale, scores.softcap, scores.sinks, frozenset(inner)
    )


def _heads_of(softmax: Node, query: Sequence[Any], key: Node) -> Any:
    """Query heads: of the scores where rows of the queries are heads, too (`capture/grouped_heads.py`)."""
    scores, kv_heads = shape_of(softmax) or (), (shape_of(key) or ())[1]
    if len(scores) == 4 and isinstance(scores[1], int) and scores[1] % kv_heads == 0:
        return scores[1]
    return query[1] if len(query) == 4 else kv_heads  # a single one is of all queries


def path_of(softmax: Node) -> dict[Node, None]:
    """The product of queries and keys, and in order what leads from it to the softmax."""
    nodes = softmax.graph.nodes
    ends = [node for node in nodes if target_name(node) in _ENDS]
    sizes = (node for node in nodes if reads_shape_only(node))  # rotary embeddings may be products, too
    behind = ancestors(softmax.all_input_nodes, [*ends, *sizes])
    products = [node for node in ends if node in behind and target_name(node) in PRODUCTS]
    if len(products) > 1:
        raise UnknownFormError(products[1], "is another product in its scores")
    if not products:
        node: Any = softmax.args[0]
        while target_name(node) in LAYOUTS | {"add", "mul", "div", "masked_fill", "unsqueeze"}:
            node = node.args[0]
        raise UnknownFormError(node)
    path = dict.fromkeys(products)
    for node in nodes:
        if node in behind and not reads_shape_only(node) and any(arg in path for arg in node.all_input_nodes):
            path[node] = None
    return path


def _weighted_values(
    gm: GraphModule, softmax: Node, outputs: set[Node], scores: Iterable[Node]
) -> tuple[list[Node], Node]:
    """The nodes from the softmax to the product with the values, and that product."""
    node, path = softmax, list[Node]()
    hidden = [score.args[1] for score in scores if target_name(score) == "masked_fill"]
    while True:
        users = real_users(node)
        if (filled := _without_nan(gm, node, users)) is not None:
            path += users
            node, users = filled, real_users(filled)
        if len(users) != 1:
            passing = PRODUCTS | LAYOUTS
            other = next((user for user in users if target_name(user) not in passing), (softmax, *users)[-1])
            returned = other.op == "output" or not outputs.isdisjoint((other, node))
            why = ": call the model with output_attentions=False" if returned else ""
            raise UnknownFormError(other, f"reads its probabilities{why}")
        (user,) = users
        if target_name(user) == "bmm" and user.args[0] is node:
            return path, user
        if target_name(user) in ("native_dropout", "bernoulli"):
            raise UnknownFormError(user, "is on: call model.eval() first")
        # A hidden score has no probability; a row of hidden scores alone would be NaN.
        hides = target_name(user) == "masked_fill" and user.args[1] in hidden
        zeros = hides and constant_of(gm, user.args[2]) == 0
        if target_name(user) not in LAYOUTS and not _drops_last(user) and not zeros:
            raise UnknownFormError(user, "changes its probabilities")
        path.append(user)
        node = user


def _without_nan(gm: GraphModule, node: Node, users: Sequence[Node]) -> Node | None:
    """The node that puts 0 in the place of NaN, where a query sees no key; None where there is none."""
    nans = [user for user in users if target_name(user) == "isnan"]
    filled = [user for user in users if target_name(user) in ("where", "masked_fill")]
    if (len(users), len(nans), len(filled)) != (2, 1, 1) or real_users(nans[0]) != filled:
        return None
    args: Any = filled[0].args
    fill = args[1] if target_name(filled[0]) == "where" else args[2]
    hides = args == (nans[0], fill, node) or args == (node, nans[0], fill)
    is_zero = target_name(fill) == "zeros_like" if shape_of(fill) else constant_of(gm, fill) == 0
    return filled[0] if hides and is_zero else None


def _drops_last(node: Node) -> bool:
    """Whether a node is `x[..., :-1]`."""
    return cut_of(node) == (len(shape_of(node) or ()) - 1, 0, -1, 1)


def _side(
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
