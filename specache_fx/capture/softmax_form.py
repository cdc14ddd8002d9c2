"""Reads attention that is spelt out as products and a softmax into the parts of the normal form.

    p = bmm(q, k^T)                          with batch and heads as one; baddbmm adds a bias
    s = softcap * tanh(scale * p / softcap)  either may be missing
    s = s + mask                             any number of masks and biases; masked_fill and where with a huge negative
    w = softmax(cat([s, sinks]))[..., :-1]   with or without sinks; the maximum may be subtracted first
    out = bmm(w, v)                          sinks may be a gate behind it (`capture/sink_gate.py`)

Changes of dtype and of shape don't matter. Every other operation on the way is an
`UnknownFormError` that names it: nothing is skipped over. What was read is proved afterwards (`capture/prove_form.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from specache_fx.capture.graph_slices import ancestors
from specache_fx.capture.graph_utils import same_sizes, shape_of, target_name
from specache_fx.capture.mask_row import MaskRow
from specache_fx.capture.score_chain import ScoreChain
from specache_fx.capture.score_ops import (
    CASTS,
    PRODUCTS,
    RESHAPES,
    UnknownFormError,
    drops_last,
    real_users,
    swaps_last_two,
)
from specache_fx.capture.sink_gate import sink_gate


@dataclass
class SoftmaxForm:
    """What was read.

    Attributes:
        output: The weighted sum of the values, `[batch, num_heads, q_len, value_dim]`, or the first two as one.
        query: `[batch, num_heads, q_len, key_dim]`, or the first two as one.
        key: `[batch, num_heads, kv_len, key_dim]`.
        value: `[batch, num_heads, kv_len, value_dim]`.
        num_heads: Heads of the key, after repeat_kv.
        mask: The newest query's, as `MaskRow` builds it; None where nothing is added.
        scale: Factor on the products.
        softcap: Bound of the scaled products.
        sinks: `[num_heads]`, computed from parameters alone.
        inner: All nodes from query, key, value, masks and sinks to the output, that included.
    """

    output: Node
    query: Node
    key: Node
    value: Node
    num_heads: int
    mask: Node | None = None
    scale: float = 1.0
    softcap: float | None = None
    sinks: Node | None = None
    inner: set[Node] = field(default_factory=set)


class _Reader:
    """Reads one softmax."""

    def __init__(self, gm: GraphModule, softmax: Node, outputs: set[Node], rows: MaskRow) -> None:
        self.gm, self.softmax, self.outputs, self.rows = gm, softmax, outputs, rows
        self._dead_ends: dict[Node, UnknownFormError] = {}

    def read(self) -> SoftmaxForm:
        self._check_softmax()
        path = self._scores(self.softmax.args[0])
        after, output = self._weighted_values()
        product = path[0]
        query, key, alpha, bias, beta = self._factors(product)
        query, query_path, _ = self._strip(query, transposed=False)
        key, key_path = self._side(key, transposed=True)
        value, value_path = self._side(output.args[1], transposed=False)
        dims = shape_of(query) or ()
        num_heads = dims[1] if len(dims) == 4 else (shape_of(key) or ())[1]  # a single one is of all queries
        if len(users := real_users(output)) == 1 and _splits_heads(users[0], num_heads):
            after, output = [*after, output], users[0]
        chain = ScoreChain(self.gm, self.softmax, num_heads, self.rows)
        chain.start(product, alpha, bias, beta)
        chain.follow(path)
        if any(drops_last(node) for node in after) != (chain.sinks is not None):
            raise UnknownFormError(self.softmax, "and the columns that it is taken over")
        inner = {*path, self.softmax, *after, output, *query_path, *key_path, *value_path, *chain.inner}
        sinks, gate = chain.sinks, sink_gate(path[-1], output, num_heads)
        if sinks is None and gate is not None:
            output, sinks = gate.output, gate.sinks
            inner |= gate.inner
        return SoftmaxForm(
            output, query, key, value, num_heads, chain.mask, chain.scale, chain.softcap, sinks, inner
        )

    def _check_softmax(self) -> None:
        node, dims = self.softmax, shape_of(self.softmax)
        if dims is None or len(dims) not in (3, 4) or node.args[1] not in (-1, len(dims) - 1):
            raise UnknownFormError(node, "is not over the last of 3 or 4 dimensions")

    def _scores(self, node: Any) -> list[Node]:
        """The nodes from the product of queries and keys to `node`, along the scores."""
        if not isinstance(node, Node) or shape_of(node) is None or node.op != "call_function":
            raise UnknownFormError(node if isinstance(node, Node) else self.softmax)
        name = target_name(node)
        if name in PRODUCTS:
            return [node]
        if name in CASTS | RESHAPES | {"tanh", "masked_fill", "sub", "div", "clamp", "clamp_min"}:
            candidates = [node.args[0]]
        elif name in ("add", "mul", "maximum"):
            candidates = list(node.args[:2])
        elif name == "where" and len(node.args) == 3:
            candidates = list(node.args[1:])
        elif name == "cat" and isinstance(node.args[0], (list, tuple)) and len(node.args[0]) == 2:
            candidates = [node.args[0][0]]
        else:
            raise UnknownFormError(node)
        found: list[list[Node]] = []
        failed: list[Node] = []
        for candidate in candidates:
            if not isinstance(candidate, Node) or shape_of(candidate) is None:
                continue
            if candidate not in self._dead_ends:
                try:
                    found.append(self._scores(candidate))
                    continue
                except UnknownFormError as failure:
                    self._dead_ends[candidate] = failure
            failed.append(candidate)
        if len(found) == 1:
            return [*found[0], node]
        if found or not failed:
            raise UnknownFormError(node)
        # The one that comes from a product says more than one that is a mask anyhow.
        raise self._dead_ends[
            max(failed, key=lambda one: any(target_name(origin) in PRODUCTS for origin in ancestors([one])))
        ]

    def _weighted_values(self) -> tuple[list[Node], Node]:
        """The nodes from the softmax to the product with the values, and that product."""
        node = self.softmax
        path: list[Node] = []
        while True:
            users = real_users(node)
            if len(users) != 1:
                passing = PRODUCTS | CASTS | RESHAPES
                other = next((user for user in users if target_name(user) not in passing), self.softmax)
                returned = other.op == "output" or not self.outputs.isdisjoint((other, node))
                why = ": call the model with output_attentions=False" if returned else ""
                raise UnknownFormError(other, f"reads its probabilities{why}")
            (user,) = users
            if target_name(user) == "bmm" and user.args[0] is node:
                return path, user
            if target_name(user) in ("native_dropout", "bernoulli"):
                raise UnknownFormError(user, "is on: call model.eval() first")
            known = target_name(user) in CASTS | RESHAPES or drops_last(user)
            if not known or user.args[0] is not node:
                raise UnknownFormError(user, "changes its probabilities")
            path.append(user)
            node = user

    def _factors(self, product: Node) -> tuple[Any, Any, float, Any, float]:
        """Query, key, factor, bias and the bias's factor of the product of queries and keys."""
        factors: list[Any] = [product.kwargs.get(name, 1) for name in ("alpha", "beta")]
        if not all(isinstance(factor, (int, float)) for factor in factors):
            raise UnknownFormError(product)
        alpha, beta = map(float, factors)
        *biases, query, key = product.args
        return query, key, alpha, biases[0] if biases and beta else None, beta

    def _side(self, node: Any, transposed: bool) -> tuple[Node, list[Node]]:
        """Keys or values as `[batch, num_heads, kv_len, dim]`, and the nodes that make the product's operand of it."""
        found, path, is_transposed = self._strip(node, transposed)
        dims = shape_of(found) or ()
        if is_transposed != transposed or len(dims) != 4 or not isinstance(dims[1], int):
            raise UnknownFormError(
                node if isinstance(node, Node) else self.softmax, "is no [..., kv_len, dim]"
            )
        return found, path

    def _strip(self, node: Any, transposed: bool) -> tuple[Any, list[Node], bool]:
        """Go back through casts, reshapes and, if it is to be `transposed`, a swap of the last two dimensions.

        Returns:
            What is there, the nodes on the way, and whether dimensions were swapped.
        """
        path, swapped = [], False
        while isinstance(node, Node) and node not in self.outputs and node.args:
            name, dims = target_name(node), shape_of(node)
            source = node.args[0]
            before = shape_of(source)
            if dims is None or before is None:
                break
            if name in CASTS or _is_of_all_heads(name, before, dims):
                pass
            elif transposed and not swapped and swaps_last_two(node):
                swapped = True
            elif not (name in RESHAPES and _merges_heads(before, dims)):
                break
            path.append(node)
            node = source
        return node, path, swapped


def _merges_heads(before: tuple[Any, ...], dims: tuple[Any, ...]) -> bool:
    """Whether a reshape puts batch and heads into one dimension. Dynamo may have two symbols for the length."""
    if (len(before), len(dims)) != (4, 3):
        return False
    return same_sizes((before[0] * before[1], before[3]), (dims[0], dims[2]))


def _is_of_all_heads(name: str, before: tuple[Any, ...], dims: tuple[Any, ...]) -> bool:
    """Whether a node gives the one head of keys or values to each query head."""
    heads = len(before) == len(dims) == 4 and before[1] == 1
    return name == "expand" and heads and same_sizes((before[0], *before[2:]), (dims[0], *dims[2:]))


def _splits_heads(node: Node, num_heads: Any) -> bool:
    """Whether a node makes `[batch, num_heads, q_len, dim]` of a product's result."""
    before, dims = shape_of(node.args[0]), shape_of(node)
    if target_name(node) not in RESHAPES or before is None or dims is None or len(dims) != 4:
        return False
    return same_sizes((num_heads, *before[1:]), dims[1:])


def read_form(gm: GraphModule, softmax: Node, outputs: set[Node], rows: MaskRow) -> SoftmaxForm:
    """Read the attention around a softmax.

    Args:
        gm: The graph.
        softmax: The softmax.
        outputs: What the graph returns: the walk to the cached keys and values ends there.
        rows: Builds the masks; it may insert nodes before the softmax.

    Raises:
        UnknownFormError: Names the first operation that has no place in the normal form.
    """
    return _Reader(gm, softmax, outputs, rows).read()
