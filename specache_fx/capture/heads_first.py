"""`heads_first`: KV caches of another layout in the one that the other passes know.

    keys = cat([past_keys, k], 1)                          # output; [batch, kv_len, num_kv_heads, head_dim]
    out  = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)
        -> keys = cat([past_keys, transpose(k, 1, 2)], 2)  # output; past_keys [batch, num_kv_heads, kv_len, head_dim]
           out  = sdpa(q, keys, ...)                       # or, of repeated keys, permuted before and after

So for `[kv_len, batch, num_kv_heads, head_dim]`, which is appended to in dimension 0 and read by `permute(1, 2, 0, 3)`,
for keys `[batch, num_kv_heads, head_dim, kv_len]`, and for caches that the model itself permutes where they come in and
go out: `show_layouts` puts the permute in front of their readers.

Nothing but the layout changes, and only of what is read with heads before tokens and in no other way: the graph
computes the same, whatever its attention turns out to be. Inputs and outputs have heads first from then on; `AtBorder`
in `specache_fx/border.py` permutes them where Dynamo's tensors come in and go out.

A prompt's keys are such a cache if they are an output and read permuted. Every other graph computes the same; an output
that is permuted to be returned may be permuted for its other readers instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.cache_side import unrepeated
from specache_fx.capture.graph_edit import call, finish
from specache_fx.capture.graph_slices import eliminate_dead_code
from specache_fx.capture.graph_utils import (
    concatenated,
    is_static_input,
    order_of,
    output_node,
    placeholders,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.hidden_layouts import FORMS, follows_layout, permuted, show_layouts
from specache_fx.runtime.handle_form import ORDERS, Form, inverse, token_dim

_aten = torch.ops.aten


def _read_sizes(root: Node, keys: Node, form: Form) -> None:
    """Have what reads sizes of a cache read those of the same with heads first."""
    for user in list(root.users):
        if target_name(user) == "sym_numel":
            user.args = (keys,)
        elif target_name(user) == "sym_size":
            user.args = (keys, ORDERS[form].index(user.args[1]))


def _permuted_reads(root: Node, *, tokens_last: bool) -> tuple[Form, list[Node]] | None:
    """The form of a cache, and the nodes that read it with heads first; None if another read is no repeat_kv.

    Args:
        root: The cache.
        tokens_last: It is known to have its tokens last: a `transpose(2, 3)` alone may be one of the product.
    """
    reads, permutes = list[Node](), list[Node]()
    for user in root.users:
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
    return None if form is None or tokens_last != (form is Form.TOKENS_LAST) else (form, reads)


def _past_of(root: Node, form: Form) -> tuple[Node, Node] | None:
    """The past and the new part of a `cat` over tokens, where nothing else reads that input."""
    parts, dim = concatenated(root) or ([], 0)
    if len(parts) != 2 or dim != token_dim(form):
        return None
    past, new = parts
    is_past = past.op == "placeholder" and not is_static_input(past)
    if not is_past or not all(
        user is root or (follows_layout(user) and user.op != "output") for user in past.users
    ):
        return None
    return past, new


def _permute_cache(
    graph: Graph, root: Node, form: Form, reads: list[Node], past: tuple[Node, Node] | None
) -> Node:
    """Put the cache with heads first behind `root`; returns it."""
    order = ORDERS[form]
    with graph.inserting_after(root):
        if past is None:
            keys = permuted(graph, root, order, root)
        else:
            past[0].meta = {**past[0].meta, "val": value_of(past[0]).permute(order)}
            _read_sizes(past[0], past[0], form)
            new = permuted(graph, past[1], order, root)
            with graph.inserting_after(new):
                keys = call(graph, _aten.cat.default, ([past[0], new], 2), root)
    _read_sizes(root, keys, form)
    for read in reads:
        read.replace_all_uses_with(keys)
    with graph.inserting_after(keys):
        back = permuted(graph, keys, inverse(order), root)
    root.replace_all_uses_with(back, delete_user_cb=lambda user: user is not keys)
    return keys


def heads_first(gm: GraphModule) -> tuple[dict[int, Form], dict[int, Form]]:
    """Permute caches of other layouts to heads first.

    Returns:
        Positions of the inputs and of the outputs that have heads first from here on, and the form that they had.
    """
    graph = gm.graph
    output, inputs = output_node(graph), placeholders(graph)
    permuted_inputs: dict[int, Form] = {}
    permuted_outputs: dict[int, Form] = {}
    shown = show_layouts(graph)
    outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for root in dict.fromkeys(out for out in outs if isinstance(out, Node)):
        if root.op == "placeholder" or len(shape_of(root) or ()) != 4:
            continue
        found = _permuted_reads(root, tokens_last=shown.get(root) is Form.TOKENS_LAST)
        if found is None:
            continue
        form, reads = found
        past = _past_of(root, form)
        if past is None and (concatenated(root) or (None, None))[1] == token_dim(form):
            continue
        keys = _permute_cache(graph, root, form, reads, past)
        places = [i for i, out in enumerate(outs) if out is root]
        for i in places:
            outs[i], permuted_outputs[i] = keys, form
        if past is not None:
            permuted_inputs[inputs.index(past[0])] = form
    if permuted_outputs or shown:
        output.args = (tuple(outs),)
        eliminate_dead_code(graph)
        finish(gm)
    return permuted_inputs, permuted_outputs
