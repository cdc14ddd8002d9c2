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
`specache_fx/runners/border.py` has them in the model's form where Dynamo's tensors come in and go out.

The graph computes the same. What else reads a cache reads it in the model's form, and `match_attention` refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.attention.run_form import side_of_product
from specache_fx.capture.caches.by_indices import ById
from specache_fx.capture.caches.cache_records import Written
from specache_fx.capture.caches.cache_side import returned_of, without_repeat
from specache_fx.capture.caches.cache_views import (
    as_in_model,
    attentions_of,
    heads_first_of,
    read_sides,
    read_sizes,
    sides_in,
)
from specache_fx.capture.caches.id_runs import Operand
from specache_fx.capture.graph.graph_edit import call, finish, place_behind
from specache_fx.capture.graph.graph_slices import ancestors, eliminate_dead_code
from specache_fx.capture.graph.graph_utils import END, is_float, newest, placeholders, shape_of
from specache_fx.capture.graph.left_alone import UnknownFormError
from specache_fx.capture.program import CacheForm
from specache_fx.runtime.handles.handle_form import HEADS_FIRST, MOST_DIMS, PAIR, num_sides, token_dim

_aten = torch.ops.aten


def heads_first(gm: GraphModule) -> tuple[dict[int, CacheForm], dict[int, CacheForm]]:
    """Have caches of other forms come in and go out with heads first, in place.

    Returns:
        The form of inputs and outputs that had another one, by position.
    """
    outputs = gm.graph.output_node().all_input_nodes
    returned = _caches(outputs)
    rewrite, by_id = _Rewrite(gm, returned), ById(gm)
    for attention, operands in attentions_of(gm) if returned else ():
        if not all(_is_plain(operand, set(outputs)) for operand in operands):
            found = by_id.moved(operands, [*returned])
            if found is not None and is_known(found):
                rewrite.attention(attention, operands, found)
    return rewrite.finish()


def _caches(outputs: Sequence[Node]) -> dict[Node, Node]:
    """Results that may be caches, each with what is returned of it: itself, or its newest tokens."""
    whole, kept = dict[Node, Node](), dict[Node, Node]()
    for out in outputs:
        dims = len(shape_of(out) or ())
        is_cut = any(newest(out, dim) is not None for dim in range(dims))
        cache: Any = out.args[0] if is_cut else out
        if is_float(out, MOST_DIMS) and dims > 2 and cache.op != "placeholder":
            (kept if is_cut else whole)[cache] = out
    return kept | whole


def _is_plain(operand: Operand, outputs: set[Node]) -> bool:
    """Whether an operand is a cache with heads first, repeated or as it is."""
    node = operand.node
    if len(shape_of(node) or ()) == 3:
        try:
            node, _ = side_of_product(node, outputs, transposed=operand.transposed)
        except UnknownFormError:
            return False
    return returned_of(without_repeat(node), outputs) is not None


def is_known(found: Sequence[Written]) -> bool:
    """Whether keys and values are apart, or of a pair, keys first; and heads of both in one order."""
    keys, values = found
    if keys.is_tiled != values.is_tiled:
        return False
    paired = PAIR in keys.form or PAIR in values.form
    sides = (keys.side, values.side) == (0, 1) and keys.form == values.form
    return not paired or (sides and keys.tensor is values.tensor)


class _Rewrite:
    """The rewrite of one graph, with what it returns of each cache."""

    def __init__(self, gm: GraphModule, returned: Mapping[Node, Node]) -> None:
        self._gm, self._graph, self._returned = gm, gm.graph, returned
        self._places = {node: i for i, node in enumerate(placeholders(gm.graph))}
        self._sides: dict[tuple[Node, int], Node] = {}  # by cache: keys or values with heads first
        self._forms: dict[Node, CacheForm] = {}  # of caches
        self._past: dict[Node, list[Node]] = {}  # by input: itself, or its keys and values
        self._inputs: dict[int, CacheForm] = {}

    def attention(self, attention: Node, operands: Sequence[Operand], found: Sequence[Written]) -> None:
        """Have an attention read its caches with heads first."""
        forms = {each.tensor: CacheForm(each.form, each.num_kv_heads) for each in found}
        if all(
            self._forms.get(cache, form) == form
            and (self._returned[cache] is cache or self._num_kept(cache, form) is not None)
            for cache, form in forms.items()
        ):
            self._forms |= forms
            sides = [self._side(*both) for both in zip(operands, found, strict=True)]
            read_sides(attention, operands, sides, is_tiled=found[0].is_tiled)

    def _side(self, operand: Operand, each: Written) -> Node:
        """Keys or values with heads first."""
        if each.form == HEADS_FIRST and each.tensor in ancestors([operand.node]):
            return each.tensor
        if (each.tensor, each.side) not in self._sides:
            past = [] if each.buffer is None else [self._past_of(each, each.buffer)[each.side]]
            between = ancestors([operand.node, each.tensor], [each.new, *past]) - {each.new, *past}
            with self._graph.inserting_before(place_behind([each.new])):
                args = (each.new, each.new_form, each.num_kv_heads, each.side, each.tensor)
                side = heads_first_of(self._graph, *args)
                if past:
                    side = call(self._graph, _aten.cat.default, ([*past, side], 2), each.tensor)
            self._sides[each.tensor, each.side] = side
            for node in between if past else ():
                read_sizes(node, [*past, side], shape_of(node) or ())
        return self._sides[each.tensor, each.side]

    def _past_of(self, each: Written, past: Node) -> list[Node]:
        if each.form == HEADS_FIRST:
            return [past]
        if past not in self._past:
            nodes = self._past[past] = sides_in(self._graph, past, each.form, each.num_kv_heads)
            values = placeholders(self._graph).index(nodes[1]) if len(nodes) > 1 else None
            self._inputs[self._places[past]] = CacheForm(each.form, each.num_kv_heads, values)
        return self._past[past]

    def _num_kept(self, cache: Node, form: CacheForm) -> int | None:
        """How many of the newest tokens of a cache are returned; None where all are."""
        return newest(self._returned[cache], token_dim(form.form))

    def finish(self) -> tuple[dict[int, CacheForm], dict[int, CacheForm]]:
        """Have outputs be the sides; what else reads a cache reads what the model has of them."""
        output = self._graph.output_node()
        outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        given = dict[int, CacheForm]()
        for cache in dict.fromkeys(cache for cache, _ in self._sides):
            form = self._forms[cache]
            sides = [self._sides[cache, side] for side in range(num_sides(form.form))]
            with self._graph.inserting_before(place_behind(sides)):
                whole = as_in_model(self._graph, sides, form.form, cache)
            made = ancestors([whole])
            for user in [user for user in cache.users if user is not output and user not in made]:
                user.replace_input_with(cache, whole)
            if kept := self._num_kept(cache, form):
                with self._graph.inserting_before(output):
                    cut = [(side, 2, -kept, END) for side in sides]
                    sides = [call(self._graph, _aten.slice.Tensor, args, cache) for args in cut]
            for i in [i for i, out in enumerate(outs) if out is self._returned[cache]]:
                outs[i], *more = sides
                if form.form != HEADS_FIRST:
                    given[i] = form._replace(values=len(outs) if more else None)
                outs += more
        output.args = (tuple(outs),)
        if self._forms:
            eliminate_dead_code(self._graph)
            finish(self._gm)
        return self._inputs, given
