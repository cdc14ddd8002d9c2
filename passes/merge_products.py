"""`merge_products`: a product with one weight for all lanes and batch rows reads that weight once.

    e = aten.expand(aten.t(w), [lanes, batch, in, out]); p = aten.bmm(x, aten.view(e, [lanes * batch, in, out]))
        -> m = aten.mm(aten.view(x, [-1, in]), aten.t(w)); p = aten.view(m, [lanes * batch, rows, out])

The output of an attention, heads and tokens swapped back, is not contiguous. vmap makes a batch of products of a linear
layer on such an input, and reads the weight once for each lane and batch row. Reading bounds decoding.

It does not match a second operand that differs from row to row of the batch, as attention's own.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_edit import call, erase_unused, finish
from specache_fx.capture.graph_utils import value_of
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.unsqueeze.default,
)


def merge_products(gm: GraphModule, program: Program) -> GraphModule:
    """Make one product of each batch of products with one matrix."""
    graph, changed = gm.graph, False
    for node in list(graph.nodes):
        if node.target is not aten.bmm.default or (matrix := _shared_matrix(node)) is None:
            continue
        rows = node.args[0]
        batch, count, width = value_of(rows).shape
        with graph.inserting_before(node):
            flat = call(graph, aten.reshape.default, (rows, [batch * count, width]), node, "rows")
            product = call(graph, aten.mm.default, (flat, matrix), node, "product")
            merged = call(graph, aten.view.default, (product, list(value_of(node).shape)), node, "merged")
        expanded = node.args[1]
        node.replace_all_uses_with(merged)
        graph.erase_node(node)
        erase_unused(expanded, _VIEWS)
        changed = True
    return finish(gm) if changed else gm


def _shared_matrix(node: Node) -> Node | None:
    """The `[in, out]` matrix that every entry of a `bmm`'s second operand is; None where they differ."""
    source = node.args[1]
    assert isinstance(source, Node)
    wanted = value_of(source)
    if wanted.stride(0) != 0 and wanted.shape[0] != 1:
        return None
    while value_of(source).dim() > 2 and source.target in _VIEWS:
        source = source.args[0]
        assert isinstance(source, Node)
    found = value_of(source)
    same = tuple(found.shape) == tuple(wanted.shape[1:]) and found.stride() == wanted.stride()[1:]
    return source if same else None


MERGE_PRODUCTS = Pass("merge_products", merge_products, optional=True)
