"""`heads_first`: KV caches `[batch, kv_len, num_kv_heads, head_dim]` in the layout that the other passes know.

    keys = cat([past_keys, k], 1)                          # output
    out  = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)
        -> keys = cat([past_keys, transpose(k, 1, 2)], 2)  # output; past_keys [batch, num_kv_heads, kv_len, head_dim]
           out  = sdpa(q, repeat_kv(keys), ...)

Nothing but the layout changes, and only of what is read with heads and tokens swapped and in no other way: the graph
computes the same, whatever its attention turns out to be. Inputs and outputs have their dimensions 1 and 2 swapped from
then on; `TokensFirst` in `specache_fx/runners.py` swaps them where Dynamo's tensors come in and go out.

A prompt's keys are such a cache if they are an output and read swapped. Every other graph stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.graph_edit import call, finish
from specache_fx.capture.graph_slices import eliminate_dead_code
from specache_fx.capture.graph_utils import (
    concatenated,
    is_static_input,
    output_node,
    placeholders,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)

_aten = torch.ops.aten
_OTHER = {1: 2, 2: 1}


def _swaps(node: Node) -> bool:
    """Whether a node swaps dimensions 1 and 2 of a 4-D tensor."""
    dims: Any = node.args[1:]
    if node.target is _aten.permute.default:
        return tuple(dim % 4 for dim in dims[0]) == (0, 2, 1, 3)
    return node.target is _aten.transpose.int and {dim % 4 for dim in dims} == {1, 2}


def _swap_sizes(tensor: Node) -> None:
    for user in list(tensor.users):
        if user.target is _aten.sym_size.int:
            user.args = (tensor, _OTHER.get(user.args[1], user.args[1]))  # type: ignore[arg-type]


def _harmless(user: Node) -> bool:
    """Whether a node reads a cache in a way that does not depend on the layout, or can follow it."""
    return user.op == "output" or target_name(user) in ("sym_size", "sym_numel")


def _repeated(node: Node, root: Node) -> tuple[Node, int] | None:
    """Where repeat_kv of `root` that begins with `node` ends, and how often it repeats each head."""
    chain = [node]
    for name in ("expand", "reshape"):
        users = list(chain[-1].users)
        if name == "reshape" and len(users) == 1 and target_name(users[0]) == "clone":
            users = list(users[0].users)
        if len(users) != 1 or target_name(users[0]) != name:
            return None
        chain.append(users[0])
    batch, tokens, heads, dim = shape_of(root) or (None,) * 4
    inserted, expanded, merged = (shape_of(step) or () for step in chain)
    groups = expanded[3] if len(expanded) == 5 else 0
    is_repeat = (
        target_name(node) == "unsqueeze"
        and same_sizes(inserted, (batch, tokens, heads, 1, dim))
        and same_sizes(expanded, (batch, tokens, heads, groups, dim))
        and same_sizes(merged, (batch, tokens, heads * groups, dim))
    )
    return (chain[-1], groups) if is_repeat else None


def _swapped_reads(root: Node) -> list[tuple[Node, int]] | None:
    """The nodes that read a cache with heads and tokens swapped, each with its repeats; None if others read it too."""
    reads: list[tuple[Node, int]] = []
    for user in root.users:
        if _harmless(user):
            continue
        end, groups = (root, 1) if _swaps(user) else (_repeated(user, root) or (None, 1))
        if end is None:
            return None
        swaps = [user] if end is root else list(end.users)
        if not swaps or not all(_swaps(swap) for swap in swaps):
            return None
        reads += [(swap, groups) for swap in swaps]
    return reads or None


def _past_of(root: Node) -> tuple[Node, Node] | None:
    """The past and the new part of `cat([past, new], 1)`, where nothing else reads that input."""
    parts, dim = concatenated(root) or ([], 0)
    if len(parts) != 2 or dim != 1:
        return None
    past, new = parts
    is_past = past.op == "placeholder" and not is_static_input(past)
    if not is_past or not all(user is root or _harmless(user) for user in past.users):
        return None
    return past, new


def _swap_cache(
    graph: Graph, root: Node, reads: list[tuple[Node, int]], past: tuple[Node, Node] | None
) -> Node:
    """Put the cache with heads first behind `root`; returns it."""
    with graph.inserting_after(root):
        if past is None:
            keys = call(graph, _aten.transpose.int, (root, 1, 2), root)
        else:
            past[0].meta = {**past[0].meta, "val": value_of(past[0]).transpose(1, 2)}
            _swap_sizes(past[0])
            new = call(graph, _aten.transpose.int, (past[1], 1, 2), root)
            with graph.inserting_after(new):
                keys = call(graph, _aten.cat.default, ([past[0], new], 2), root)
    for swap, groups in reads:
        with graph.inserting_before(swap):
            read = keys if groups == 1 else _repeat(graph, keys, groups, swap)
        swap.replace_all_uses_with(read)
    return keys


def _repeat(graph: Graph, keys: Node, groups: int, origin: Node) -> Node:
    """repeat_kv at the graph's insertion point."""
    sizes: list[Any] = [
        size if isinstance(size, int) else call(graph, _aten.sym_size.int, (keys, dim), origin)
        for dim, size in enumerate(value_of(keys).shape)
    ]
    batch, heads, tokens, dim = sizes
    each = call(graph, _aten.unsqueeze.default, (keys, 2), origin)
    each = call(graph, _aten.expand.default, (each, [batch, heads, groups, tokens, dim]), origin)
    return call(graph, _aten.reshape.default, (each, [batch, heads * groups, tokens, dim]), origin)


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
        if reads is None or (past is None and concatenated(root) is not None):
            continue
        keys = _swap_cache(graph, root, reads, past)
        places = [i for i, out in enumerate(outs) if out is root]
        for i in places:
            outs[i] = keys
        swapped_outputs += places
        if past is not None:
            swapped_inputs.append(inputs.index(past[0]))
            _swap_sizes(root)
            root.replace_all_uses_with(keys)
    if swapped_outputs:
        output.args = (tuple(outs),)
        eliminate_dead_code(graph)
        finish(gm)
    return swapped_inputs, swapped_outputs
