"""`heads_first`: KV caches `[batch, kv_len, num_kv_heads, head_dim]` in the layout that the other passes know.

    keys = cat([past_keys, k], 1)                          # output
    out  = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)
        -> keys = cat([past_keys, transpose(k, 1, 2)], 2)  # output; past_keys [batch, num_kv_heads, kv_len, head_dim]
           out  = sdpa(q, keys, ...)                       # or, of repeated keys, with a swap before and after

Nothing but the layout changes, and only of what is read with heads and tokens swapped and in no other way: the graph
computes the same, whatever its attention turns out to be. Inputs and outputs have their dimensions 1 and 2 swapped from
then on; `AtBorder` in `specache_fx/runners.py` swaps them where Dynamo's tensors come in and go out.

A prompt's keys are such a cache if they are an output and read swapped. Every other graph stays as it is.
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
    output_node,
    placeholders,
    shape_of,
    swaps,
    target_name,
    value_of,
)

_aten = torch.ops.aten


def _read_sizes(root: Node, keys: Node) -> None:
    """Have what reads sizes of a cache with tokens first read those of the same with heads first."""
    for user in list(root.users):
        if target_name(user) == "sym_numel":
            user.args = (keys,)
        elif target_name(user) == "sym_size":
            dim: Any = user.args[1]
            user.args = (keys, {1: 2, 2: 1}.get(dim, dim))


def _harmless(user: Node) -> bool:
    """Whether a node reads a cache in a way that does not depend on the layout, or can follow it."""
    return user.op == "output" or target_name(user) in ("sym_size", "sym_numel")


def _swapped_reads(root: Node) -> list[Node] | None:
    """The nodes that swap heads and tokens of a cache; None if another read is no repeat_kv."""
    reads, others = list[Node](), [user for user in root.users if not _harmless(user)]
    for user in others:
        if swaps(user, 1, 2):
            reads.append(user)
            continue
        end = user
        while target_name(end) in ("unsqueeze", "expand", "clone") and len(end.users) == 1:
            end = next(iter(end.users))
        is_repeat = unrepeated(end, heads=2)[0] is root and end.users
        if not is_repeat or not all(swaps(reader, 1, 2) for reader in end.users):
            return None
    return reads if others else None


def _past_of(root: Node) -> tuple[Node, Node] | None:
    """The past and the new part of `cat([past, new], 1)`, where nothing else reads that input."""
    parts, dim = concatenated(root) or ([], 0)
    if len(parts) != 2 or dim != 1:
        return None
    past, new = parts
    is_past = past.op == "placeholder" and not is_static_input(past)
    if not is_past or not all(
        user is root or (_harmless(user) and user.op != "output") for user in past.users
    ):
        return None
    return past, new


def _swap_cache(graph: Graph, root: Node, reads: list[Node], past: tuple[Node, Node] | None) -> Node:
    """Put the cache with heads first behind `root`; returns it."""
    with graph.inserting_after(root):
        if past is None:
            keys = call(graph, _aten.transpose.int, (root, 1, 2), root)
        else:
            past[0].meta = {**past[0].meta, "val": value_of(past[0]).transpose(1, 2)}
            _read_sizes(past[0], past[0])
            new = call(graph, _aten.transpose.int, (past[1], 1, 2), root)
            with graph.inserting_after(new):
                keys = call(graph, _aten.cat.default, ([past[0], new], 2), root)
    _read_sizes(root, keys)
    for swap in reads:
        swap.replace_all_uses_with(keys)
    with graph.inserting_after(keys):
        back = call(graph, _aten.transpose.int, (keys, 1, 2), root)
    root.replace_all_uses_with(back, delete_user_cb=lambda user: user is not keys)
    return keys


def heads_first(gm: GraphModule) -> tuple[list[int], list[int]]:
    """Swap heads and tokens of the caches that have tokens first.

    Returns:
        Positions of the inputs and of the outputs whose dimensions 1 and 2 are swapped from here on.
    """
    graph = gm.graph
    output, inputs = output_node(graph), placeholders(graph)
    outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    swapped_inputs: list[int] = []
    swapped_outputs: list[int] = []
    for root in dict.fromkeys(out for out in outs if isinstance(out, Node)):
        if root.op == "placeholder" or len(shape_of(root) or ()) != 4:
            continue
        reads, past = _swapped_reads(root), _past_of(root)
        if reads is None or (past is None and (concatenated(root) or (None, 0))[1] == 1):
            continue
        keys = _swap_cache(graph, root, reads, past)
        places = [i for i, out in enumerate(outs) if out is root]
        for i in places:
            outs[i] = keys
        swapped_outputs += places
        if past is not None:
            swapped_inputs.append(inputs.index(past[0]))
    if swapped_outputs:
        output.args = (tuple(outs),)
        eliminate_dead_code(graph)
        finish(gm)
    return swapped_inputs, swapped_outputs
