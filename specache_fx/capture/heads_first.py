"""`heads_first`: KV caches of another layout in the one that the other passes know.

    keys = cat([past_keys, k], 1)                          # output; [batch, kv_len, num_kv_heads, head_dim]
    out  = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)
        -> keys = cat([past_keys, transpose(k, 1, 2)], 2)  # output; past_keys [batch, num_kv_heads, kv_len, head_dim]
           out  = sdpa(q, keys, ...)                       # or, of repeated keys, permuted before and after

So for `[kv_len, batch, num_kv_heads, head_dim]`, which is appended to in dimension 0 and read by `permute(1, 2, 0, 3)`,
for keys `[batch, num_kv_heads, head_dim, kv_len]`, and for caches that the model itself permutes where they come in and
go out: `insert_explicit_permutes` puts the permute in front of their readers.

Caches `[batch, kv_len, num_kv_heads * head_dim]` get a dimension for their heads first (Whisper's, and others that
append a projection as it comes):

    keys = cat([past, k], 1); split = reshape(keys, [b, -1, h, d])    # output keys; past, k [b, tokens, h * d]
        -> split = cat([past, unflatten(k, 2, [h, d])], 1)            # output; past [b, tokens, h, d]

Nothing but the layout changes, and only of what is read with heads before tokens and in no other way: the graph
computes the same, whatever its attention turns out to be. Inputs and outputs have heads first from then on; `AtBorder`
in `specache_fx/border.py` permutes them where Dynamo's tensors come in and go out.

A prompt's keys are such a cache if they are an output and read permuted. Every other graph computes the same; an output
that is permuted to be returned may be permuted for its other readers instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.cache_side import unrepeated
from specache_fx.capture.graph_edit import call, finish
from specache_fx.capture.graph_slices import eliminate_dead_code
from specache_fx.capture.graph_utils import (
    concatenated,
    is_float,
    is_static_input,
    order_of,
    placeholders,
    reads_shape_only,
    same_sizes,
    shape_of,
    swaps,
    target_name,
    value_of,
)
from specache_fx.capture.hidden_layouts import FORMS, follows_layout, insert_explicit_permutes, permuted
from specache_fx.runtime.handle_form import ORDERS, Form, inverse, is_laid_out, to_heads_first, token_dim

_aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """The read of a cache that replaces it: permuted, or with its merged heads taken apart.

    Attributes:
        form: The cache's.
        heads: Of merged ones.
    """

    form: Form
    heads: int = 0

    def of(self, graph: Graph, node: Node, origin: Node) -> Node:
        """Insert this view of a node."""
        if not self.heads:
            return permuted(graph, node, ORDERS[self.form], origin)
        whole = _merged_from(node, self.heads)
        return whole or call(graph, _aten.unflatten.int, (node, 2, (self.heads, -1)), origin)

    def undone(self, graph: Graph, node: Node, origin: Node) -> Node:
        """Insert what a node is this view of."""
        if not self.heads:
            return permuted(graph, node, inverse(ORDERS[self.form]), origin)
        return call(graph, _aten.flatten.using_ints, (node, 2, 3), origin)

    def of_value(self, value: torch.Tensor) -> torch.Tensor:
        """This view of a fake value; of a handle's with a handle's strides."""
        if not self.heads:
            return value.permute(ORDERS[self.form])
        if is_laid_out(value):
            return to_heads_first(value, self.form, self.heads).transpose(1, 2)
        return value.unflatten(2, (self.heads, -1))

    def read_sizes(self, root: Node, keys: Node) -> None:
        """Have what reads sizes of a cache read those of this view."""
        for user in list(root.users):
            if target_name(user) == "sym_numel":
                user.args = (keys,)
            elif target_name(user) == "sym_size":
                user.args = (keys, ORDERS.get(self.form, ORDERS[Form.HEADS_FIRST]).index(user.args[1]))


Moved = tuple[dict[int, View], dict[int, View]]
"""The inputs and the outputs that are another view of Dynamo's, by position."""


def _taken_apart(root: Node) -> tuple[View, list[Node]] | None:
    """The heads of a cache, and the reshapes that take them apart; None where something else reads it."""
    sizes = shape_of(root) or ()
    if len(sizes) != 3 or not is_float(root):
        return None
    reads = [user for user in root.users if user.op != "output" and not reads_shape_only(user)]
    shapes = [shape_of(read) or () for read in reads]
    if not reads:  # a prompt's, which are read before that
        whole = _merged_from(root)
        return None if whole is None else (View(Form.HEADS_MERGED, shape_of(whole)[2]), [])  # type: ignore[index]
    alike = all(
        read.target is _aten.reshape.default
        and len(shape) == 4
        and isinstance(shape[2], int)
        and same_sizes(shape, (*sizes[:2], *shapes[0][2:]))
        and any(swaps(user, 1, 2) or user.target is _aten.unsqueeze.default for user in read.users)
        for read, shape in zip(reads, shapes, strict=True)
    )
    return (View(Form.HEADS_MERGED, shapes[0][2]), reads) if alike else None


def _merged_from(node: Node, heads: int | None = None) -> Node | None:
    """`[batch, tokens, heads, dim]` of a node that merges heads, as many as are given; None for another node."""
    source: Any = node.args[0] if node.target is _aten.reshape.default else None
    if isinstance(source, Node) and source.target is _aten.clone.default:
        source = source.args[0]
    sizes, whole = shape_of(node) or (), shape_of(source) or ()
    is_merged = len(sizes) == 3 and len(whole) == 4 and same_sizes(sizes[:2], whole[:2])
    return source if is_merged and isinstance(whole[2], int) and heads in (None, whole[2]) else None


def _permuted_reads(root: Node, shown: Mapping[Node, Form]) -> tuple[View, list[Node]] | None:
    """The form of a cache, and the nodes that read it with heads first; None if another read is no repeat_kv.

    A `transpose(2, 3)` alone may be one of the product, but for what is `shown`.
    """
    reads, permutes = list[Node](), list[Node]()
    for user in root.users if len(shape_of(root) or ()) == 4 else ():
        if follows_layout(user):
            continue
        if order_of(user) is not None:
            reads.append(user)
            permutes.append(user)
            continue
        end = user
        while target_name(end) in ("unsqueeze", "expand", "clone") and len(end.users) == 1:
            end = next(iter(end.users))
        if unrepeated(end, heads=2)[0] is not root or not end.users:
            return None
        permutes += end.users
    forms = {FORMS.get(tuple(order_of(node) or ())) for node in permutes}
    form = forms.pop() if len(forms) == 1 else None
    alike = (form is Form.TOKENS_LAST) == (shown.get(root) is Form.TOKENS_LAST)
    return (View(form), reads) if form is not None and alike else None


def _is_past(node: Node, root: Node) -> bool:
    """Whether nothing but an append reads an input."""
    users = (user for user in node.users if user is not root)
    is_input = node.op == "placeholder" and not is_static_input(node)
    return is_input and all(user.op != "output" and follows_layout(user) for user in users)


def _move(gm: GraphModule, view_of: Callable[[Node], tuple[View, list[Node]] | None]) -> Moved:
    """Have outputs that are read as a cache, by the nodes that `view_of` gives, come in and go out as they are read."""
    inputs, output = placeholders(gm.graph), gm.graph.output_node()
    taken, given = dict[int, View](), dict[int, View]()
    outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for root in dict.fromkeys(out for out in outs if isinstance(out, Node) and out.op != "placeholder"):
        if (found := view_of(root)) is None:
            continue
        view, reads = found
        parts, dim = concatenated(root) or ([], None)
        if dim == token_dim(view.form):
            if len(parts) != 2 or not _is_past(parts[0], root):
                continue
            past, new = parts
            past.meta = {**past.meta, "val": view.of_value(value_of(past))}
            taken[inputs.index(past)] = view
            view.read_sizes(past, past)
            with gm.graph.inserting_before(root):
                new = view.of(gm.graph, new, root)
                keys = call(gm.graph, _aten.cat.default, ([past, new], 1 if view.heads else 2), root)
        else:
            with gm.graph.inserting_after(root):
                keys = view.of(gm.graph, root, root)
        view.read_sizes(root, keys)
        for read in reads:
            read.replace_all_uses_with(keys)
        with gm.graph.inserting_after(keys):
            back = view.undone(gm.graph, keys, root)
        root.replace_all_uses_with(back, delete_user_cb=partial(operator.is_not, keys))
        for i, out in enumerate(outs):
            if out is root:
                outs[i], given[i] = keys, view
    if given:
        output.args = (tuple(outs),)
        eliminate_dead_code(gm.graph)
        finish(gm)
    return taken, given


def heads_first(gm: GraphModule) -> tuple[Moved, Moved]:
    """Have caches of other layouts come in and go out with heads first, in place.

    Returns:
        Of the inputs and of the outputs, by position: those whose heads are taken apart, then those that are permuted.
    """
    apart = _move(gm, _taken_apart)
    shown = insert_explicit_permutes(gm.graph)
    swapped = _move(gm, partial(_permuted_reads, shown=shown))
    if shown:
        finish(gm)
    return apart, swapped
