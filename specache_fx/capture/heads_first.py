"""`heads_first`: KV caches of every form in the one that the other passes know.

    keys = cat([past, k], 1)                         # output; past, k [batch, tokens, num_kv_heads, head_dim]
    out = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)
        -> keys = cat([past, transpose(k, 1, 2)], 2)          # output; past [batch, num_kv_heads, kv_len, head_dim]
           out = sdpa(q, keys, ..., enable_gqa=True)

    kv = cat([past, stack([k, v])], 3)               # output
    out = sdpa(q, kv[0], kv[1], ...)
        -> keys = cat([past, k], 2)                           # output
           values = cat([past_values, v], 2)                  # past_values, values: input and output behind the others
           out = sdpa(q, keys, values, ...)

`by_indices.py` says what the keys and values of each attention are made of, whatever moves them. They are computed anew
from the past and from this call's tokens. Inputs and outputs have heads first from then on; `AtBorder` in
`specache_fx/border.py` has them in the model's form where Dynamo's tensors come in and go out.

The graph computes the same. What else reads a cache reads it in the model's form, and `match_attention` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.by_indices import Moved, Operand, moved
from specache_fx.capture.cache_side import is_cache, without_repeat
from specache_fx.capture.graph_edit import add_placeholder, call, finish
from specache_fx.capture.graph_slices import ancestors, eliminate_dead_code
from specache_fx.capture.graph_utils import (
    is_float,
    newest,
    placeholders,
    real_users,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.mask_rows import UnknownFormError
from specache_fx.capture.normalize_attention import SDPA
from specache_fx.capture.program import CacheForm
from specache_fx.capture.random_numbers import repeated
from specache_fx.capture.run_form import path_of, side_of_product
from specache_fx.capture.trace import inline
from specache_fx.runtime.handle_form import HEADS_FIRST, PAIR, dims_of, is_laid_out, order_of, sides_of

_aten = torch.ops.aten
_MOST_DIMS = 5


def heads_first(gm: GraphModule) -> tuple[dict[int, CacheForm], dict[int, CacheForm]]:
    """Have caches of other forms come in and go out with heads first, in place.

    Returns:
        The form of inputs and outputs that had another one, by position.
    """
    outputs = set(gm.graph.output_node().all_input_nodes)
    caches = [node for node in gm.graph.nodes if node in outputs and _may_be_cache(node)]
    rewrite = _Rewrite(gm)
    for attention, operands in _attentions(gm) if caches else ():
        if not all(_is_plain(operand, outputs) for operand in operands):
            found = moved(gm, operands, caches)
            if found is not None:
                rewrite.attention(attention, operands, found)
    return rewrite.finish()


def _may_be_cache(node: Node) -> bool:
    """Whether an output may be a cache as a whole, and not the newest tokens of one."""
    dims = len(shape_of(node) or ())
    whole = is_float(node, _MOST_DIMS) and dims > 2 and all(newest(node, dim) is None for dim in range(dims))
    return whole and node.op != "placeholder"


def _is_plain(operand: Operand, outputs: set[Node]) -> bool:
    """Whether an operand is a cache with heads first, repeated or as it is."""
    node = operand.node
    if len(shape_of(node) or ()) == 3:
        try:
            node, _ = side_of_product(node, outputs, transposed=operand.transposed)
        except UnknownFormError:
            return False
    return is_cache(without_repeat(node)[0], outputs)


def _attentions(gm: GraphModule) -> Iterator[tuple[Node, list[Operand]]]:
    """The attentions of a graph, with their keys and values."""
    for node in list(gm.graph.nodes):
        if node.target is SDPA:
            sides: Any = node.args[1:3]
            if all(len(shape_of(side) or ()) == 4 for side in sides):
                yield node, [Operand(side, (shape_of(side) or ())[1]) for side in sides]
        elif node.target is _aten._softmax.default:
            yield from _spelt_out(node)


def _spelt_out(softmax: Node) -> Iterator[tuple[Node, list[Operand]]]:
    try:
        product: Any = path_of(softmax)[0]
    except UnknownFormError:
        return
    heads = _num_heads(softmax, product)
    weighted = softmax
    while heads is not None and target_name(weighted) != "bmm":
        users = [user for user in real_users(weighted) if user.args and user.args[0] is weighted]
        if not users:
            return
        weighted = users[0]
    if heads is not None:
        yield softmax, [Operand(product.args[1], heads, transposed=True), Operand(weighted.args[1], heads)]  # type: ignore[arg-type]


def _num_heads(softmax: Node, product: Node) -> int | None:
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
    return dims[1] if len(dims) == 4 and isinstance(dims[1], int) else None


class _Rewrite:
    """The rewrite of one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm, self._graph = gm, gm.graph
        self._places = {node: i for i, node in enumerate(placeholders(gm.graph))}
        self._sides: dict[tuple[Node, int], Node] = {}  # by cache: keys or values with heads first
        self._forms: dict[Node, CacheForm] = {}  # of caches
        self._past: dict[Node, list[Node]] = {}  # by input: itself, or its keys and values
        self._inputs: dict[int, CacheForm] = {}
        self._changed = False

    def attention(self, attention: Node, operands: Sequence[Operand], found: Sequence[Moved]) -> None:
        """Have an attention read its caches with heads first."""
        keys, values = found
        paired = PAIR in keys.form or PAIR in values.form
        if paired and (keys.cache, keys.form, 0, 1) != (values.cache, values.form, keys.side, values.side):
            return
        for each in found:
            form = CacheForm(each.form, each.num_kv_heads)
            if self._forms.setdefault(each.cache, form) != form:
                return
        self._changed = True
        sides = [self._side(each) for each in found]
        if attention.target is SDPA:
            attention.args = (attention.args[0], *sides, *attention.args[3:7], True)
            return
        for operand, side in zip(operands, sides, strict=True):
            with self._graph.inserting_before(operand.node):
                spelt = inline(self._graph, partial(_as_operand, operand=operand), (side,), operand.node)
            operand.node.replace_all_uses_with(spelt)

    def _side(self, each: Moved) -> Node:
        """Keys or values with heads first."""
        if each.form == HEADS_FIRST:
            return each.cache
        if (each.cache, each.side) not in self._sides:
            past = None if each.past is None else self._past_of(each, each.past)[each.side]
            place = each.new.next
            while place.op == "placeholder":
                place = place.next
            with self._graph.inserting_before(place):
                side = self._heads_first(each.new, each.new_form, each)
                if past is not None:
                    side = call(self._graph, _aten.cat.default, ([past, side], 2), each.cache)
            self._sides[each.cache, each.side] = side
            for node in each.between if past is not None else ():
                self._read_sizes(node, [past, side], shape_of(node) or ())  # type: ignore[list-item]
        return self._sides[each.cache, each.side]

    def _heads_first(self, node: Node, form: str, each: Moved) -> Node:
        """Insert the view of a side."""
        dims = dims_of(form)
        if (PAIR,) in dims:
            node = call(self._graph, _aten.select.int, (node, dims.index((PAIR,)), each.side), each.cache)
        if (merged := _merged(form)) is not None:
            node = call(self._graph, _aten.unflatten.int, (node, merged, (each.num_kv_heads, -1)), each.cache)
        return self._permuted(node, order_of(form), each.cache)

    def _as_in_model(self, sides: Sequence[Node], form: str, origin: Node) -> Node:
        """Insert what the model has of sides."""
        order = order_of(form)
        nodes = [self._permuted(side, [order.index(dim) for dim in range(4)], origin) for side in sides]
        if (merged := _merged(form)) is not None:
            args = (merged, merged + 1)
            nodes = [call(self._graph, _aten.flatten.using_ints, (node, *args), origin) for node in nodes]
        if len(nodes) == 1:
            return nodes[0]
        return call(self._graph, _aten.stack.default, (nodes, dims_of(form).index((PAIR,))), origin)

    def _permuted(self, node: Node, order: Sequence[int], origin: Node) -> Node:
        moved = [dim for i, dim in enumerate(order) if i != dim]
        if len(moved) == 2:
            return call(self._graph, _aten.transpose.int, (node, *sorted(moved)), origin)
        return call(self._graph, _aten.permute.default, (node, list(order)), origin) if moved else node

    def _past_of(self, each: Moved, past: Node) -> list[Node]:
        """The past with heads first: the same input, and one more for the values of a pair."""
        if past not in self._past:
            value = value_of(past)
            sides = sides_of(value, each.form, each.num_kv_heads, is_handle=is_laid_out(value))
            more = [add_placeholder(self._graph, f"{past.name}_values", None) for _ in sides[1:]]
            self._past[past] = [past, *more]
            first = next(node for node in self._graph.nodes if node.op != "placeholder")
            with self._graph.inserting_before(first):
                for node, side in zip(self._past[past], sides, strict=True):
                    node.meta = {**past.meta, "val": side}
                old = list(past.users)
                self._read_sizes(past, [past], value.shape)
                whole = self._as_in_model(self._past[past], each.form, past)
            for user in old:
                user.replace_input_with(past, whole)
            values = placeholders(self._graph).index(more[0]) if more else None
            self._inputs[self._places[past]] = CacheForm(each.form, each.num_kv_heads, values)
        return self._past[past]

    def _read_sizes(self, node: Node, sides: Sequence[Node], shape: Sequence[Any]) -> None:
        """Have what reads sizes of a node read those of sides that are the same."""
        for user in [user for user in node.users if user.target is _aten.sym_size.int]:
            size = shape[user.args[1]]  # type: ignore[index]
            same = (
                (side, dim)
                for side in sides
                for dim in (2, 0)
                if same_sizes([size], [value_of(side).shape[dim]])
            )
            if (found := next(same, None)) is not None:
                with self._graph.inserting_before(user):
                    user.replace_all_uses_with(call(self._graph, _aten.sym_size.int, found, user))
                self._graph.erase_node(user)

    def finish(self) -> tuple[dict[int, CacheForm], dict[int, CacheForm]]:
        """Have outputs be the sides; what else reads a cache reads what the model has of them."""
        output = self._graph.output_node()
        outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        given = dict[int, CacheForm]()
        for cache, form in self._forms.items():
            if form.form == HEADS_FIRST:
                continue
            sides = [
                side
                for (of, _), side in sorted(self._sides.items(), key=lambda item: item[0][1])
                if of is cache
            ]
            order = {node: i for i, node in enumerate(self._graph.nodes)}
            with self._graph.inserting_before(max(sides, key=order.__getitem__).next):
                whole = self._as_in_model(sides, form.form, cache)
            made = ancestors([whole])
            for user in [user for user in cache.users if user is not output and user not in made]:
                user.replace_input_with(cache, whole)
            for i in [i for i, out in enumerate(outs) if out is cache]:
                outs[i], *more = sides
                given[i] = form._replace(values=len(outs) if more else None)
                outs += more
        output.args = (tuple(outs),)
        if self._changed:
            eliminate_dead_code(self._graph)
            finish(self._gm)
        return self._inputs, given


def _merged(form: str) -> int | None:
    """The dimension of heads that are merged with channels, without that of a pair."""
    dims = [dim for dim in dims_of(form) if dim != (PAIR,)]
    return next((i for i, dim in enumerate(dims) if len(dim) > 1), None)


def _as_operand(side: torch.Tensor, operand: Operand) -> torch.Tensor:
    """A product's operand, of `[batch, num_kv_heads, kv_len, head_dim]`."""
    whole = repeated(side, operand.num_heads)
    return (whole.mT if operand.transposed else whole).flatten(0, 1)
