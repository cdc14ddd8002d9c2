"""`folded_heads`: appends to caches whose heads are folded into the batch have a dimension for them again.

    keys = cat([reshape(past, [b * h, -1, d]), k], 1)    # past [b, h, tokens, d]
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
from specache_fx.capture.graph_utils import (
    concatenated,
    order_of,
    output_node,
    same_sizes,
    shape_of,
    target_name,
)

_reshape = torch.ops.aten.reshape.default


def folded_heads(gm: GraphModule) -> None:
    """Unfold what is appended, in place."""
    graph, changed = gm.graph, False
    for node in list(graph.nodes):
        parts, dims = concatenated(node), shape_of(node) or ()
        if parts is None or parts[1] != 1 or not all(isinstance(size, int) for size in dims[::2]):
            continue
        past, *others = parts[0]
        before = _unfolded(past)
        sizes = (shape_of(before) or ())[:2]
        if before is None or not all(isinstance(size, int) for size in sizes):
            continue
        with graph.inserting_before(node):
            whole = [before, *(_unfolded(each, sizes) or _apart(each, *sizes) for each in others)]
            joined = call(graph, torch.ops.aten.cat.default, (whole, 2), node)
            folded = call(graph, _reshape, (joined, [dims[0], -1, dims[2]]), node)
        node.replace_all_uses_with(folded)
        changed = True
    for out in output_node(graph).all_input_nodes:
        keys: Any = out.args[0] if out.target is _reshape else None
        dims, sizes = shape_of(keys) or (), (shape_of(out) or ())[:2]
        fixed = all(isinstance(size, int) for size in (*dims[::2], *sizes))
        if fixed and _is_fold(out, keys) and _unfolded(keys) is None and _is_operand(keys):  # a prompt's
            with graph.inserting_after(keys):
                apart = _apart(keys, *sizes)
            with graph.inserting_after(apart):
                folded = call(graph, _reshape, (apart, [dims[0], -1, dims[2]]), keys)
            keys.replace_all_uses_with(folded, delete_user_cb=lambda user, apart=apart: user is not apart)
    for node in list(graph.nodes):
        source = _unfolded(node.args[0]) if node.target is _reshape else None
        if source is not None and same_sizes(shape_of(source) or (), shape_of(node) or ()):
            node.replace_all_uses_with(source)
            changed = True
    if changed:
        eliminate_dead_code(graph)
        finish(gm)


def _unfolded(node: Any, sizes: tuple[Any, ...] | None = None) -> Node | None:
    """`[batch, heads, tokens, dim]` of a node that folds it to `[batch * heads, tokens, dim]`; None for another.

    Args:
        node: The node.
        sizes: What batch and heads have to be.
    """
    source: Any = node.args[0] if isinstance(node, Node) and node.target is _reshape else None
    if isinstance(source, Node) and source.target is torch.ops.aten.clone.default:
        source = source.args[0]
    fits = sizes is None or same_sizes((shape_of(source) or ())[:2], sizes)
    return source if fits and _is_fold(source, node) else None


def _is_operand(keys: Node) -> bool:
    """Whether keys or values are the second operand of each product that reads them, transposed or not."""
    readers = [(user, node) for node in (keys, *filter(order_of, keys.users)) for user in node.users]
    products = [(user, node) for user, node in readers if target_name(user) in ("bmm", "baddbmm")]
    return bool(products) and all(user.args[-1] is node for user, node in products)


def _is_fold(whole: Any, folded: Any) -> bool:
    sizes, merged = shape_of(whole) or (), shape_of(folded) or ()
    return len(sizes) == 4 and len(merged) == 3 and same_sizes(sizes[2:], merged[1:])


def _apart(folded: Node, batch: int, heads: int) -> Node:
    """Insert `[batch, heads, tokens, dim]` of `[batch * heads, tokens, dim]`."""
    sizes = [batch, heads, -1, (shape_of(folded) or ())[2]]
    return call(folded.graph, _reshape, (folded, sizes), folded)
