"""`folded_heads`: appends to caches whose heads are folded into the batch have a dimension for them again.

    keys = cat([reshape(past, [b * h, -1, d]), reshape(k, [b * h, q_len, d])], 1)     # past, k [b, h, tokens, d]
    returned = reshape(keys, [b, h, -1, d])
        -> returned = cat([past, k], 2);  keys = reshape(returned, [b * h, -1, d])

Decoders that attend by `bmm` fold them (fairseq and those after it). A cache that is returned with heads folded stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_edit import call, finish
from specache_fx.capture.graph_slices import eliminate_dead_code
from specache_fx.capture.graph_utils import concatenated, same_sizes, shape_of

_reshape = torch.ops.aten.reshape.default


def folded_heads(gm: GraphModule) -> None:
    """Unfold what is appended, in place."""
    graph, changed = gm.graph, False
    for node in list(graph.nodes):
        parts, dims = concatenated(node), shape_of(node) or ()
        if parts is None or parts[1] != 1 or not all(isinstance(size, int) for size in dims[::2]):
            continue
        whole = [each for each in map(_unfolded, parts[0]) if each is not None]
        sizes = [(shape_of(each) or ()) for each in whole]
        if len(whole) < len(parts[0]) or not all(same_sizes(size[:2], sizes[0][:2]) for size in sizes):
            continue
        with graph.inserting_before(node):
            joined = call(graph, torch.ops.aten.cat.default, (whole, 2), node)
            folded = call(graph, _reshape, (joined, [dims[0], -1, dims[2]]), node)
        node.replace_all_uses_with(folded)
        changed = True
    for node in list(graph.nodes):
        source = _unfolded(node.args[0]) if node.target is _reshape else None
        if source is not None and same_sizes(shape_of(source) or (), shape_of(node) or ()):
            node.replace_all_uses_with(source)
            changed = True
    if changed:
        eliminate_dead_code(graph)
        finish(gm)


def _unfolded(node: Any) -> Node | None:
    """`[batch, heads, tokens, dim]` of a node that folds it to `[batch * heads, tokens, dim]`; None for another."""
    source: Any = node.args[0] if isinstance(node, Node) and node.target is _reshape else None
    if isinstance(source, Node) and source.target is torch.ops.aten.clone.default:
        source = source.args[0]
    whole, folded = shape_of(source) or (), shape_of(node) or ()
    is_folded = len(whole) == 4 and len(folded) == 3 and same_sizes(whole[2:], folded[1:])
    return source if is_folded else None
