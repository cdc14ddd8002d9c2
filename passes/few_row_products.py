"""`few_row_products`: one to eight rows times weights, each weight read once, as fast as memory gives it.

    p = aten.mm(x, aten.t(w)); q = aten.addmm(b, x, aten.t(v))        # x [2, in], w [out, in], v [other_out, in]
        -> p, m = specache.products(x, [w, v]); q = aten.add(m, b)

A decode step has a row or two for each sequence and is bound by reading the weights. BLAS takes a few rows for a
general product, whose packing costs more than the arithmetic, and reads the weight of a single row at half of the
memory's speed: see `runtime/native/products.py`. Products of the same rows are one call.

It matches float32 and bfloat16 on the CPU alone, and weights that lie row by row.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from specache_fx.passes.base import Pass, PassState
from specache_fx.passes.graph_edit import call, erase_unused, finish
from specache_fx.passes.graph_utils import value_of
from specache_fx.runtime import ops  # noqa: F401  (defines the operator)
from specache_fx.runtime.native.products import DTYPES, MAX_ROWS

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class _Product:
    """`rows @ weight.T + bias`, and the node that is it."""

    node: Node
    rows: Node
    weight: Node
    transposed: Node
    bias: Node | None


def few_row_products(gm: GraphModule, state: PassState) -> GraphModule:
    """Make one call of all products of the same few rows."""
    groups: dict[tuple[object, ...], list[_Product]] = defaultdict(list)
    for node in gm.graph.nodes:
        if (product := _product(node)) is not None:
            same = (_viewed(product.rows), *value_of(product.rows).shape)
            # A weight that is computed is not there yet where another product of these rows is.
            is_input = product.weight.op == "placeholder"
            groups[same if is_input else (*same, node)].append(product)
    for products in groups.values():
        _replace(gm, products)
    return finish(gm) if groups else gm


def _replace(gm: GraphModule, products: list[_Product]) -> None:
    graph, first = gm.graph, products[0]
    with graph.inserting_before(first.node):
        weights = [product.weight for product in products]
        results = call(
            graph, torch.ops.specache.products.default, (first.rows, weights), first.node, "products"
        )
        outs = [
            call(graph, operator.getitem, (results, i), product.node, "product")
            for i, product in enumerate(products)
        ]
    for product, out in zip(products, outs, strict=True):
        node = product.node
        with graph.inserting_before(node):
            biased = (out, product.bias)
            whole = out if product.bias is None else call(graph, aten.add.Tensor, biased, node, "biased")
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        erase_unused(product.transposed, (aten.t.default,))
        erase_unused(product.rows, _VIEWS)


def _viewed(node: Node) -> Node:
    """What a chain of views of one order of elements shows: each product of a model has a view of its own."""
    while node.target in _VIEWS:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _product(node: Node) -> _Product | None:
    """What a node multiplies; None where that is not a few rows and a weight."""
    bias: Node | None = None
    if node.target is aten.mm.default:
        rows, transposed = node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, rows, transposed = node.args  # type: ignore[assignment]
    else:
        return None
    assert isinstance(rows, Node) and isinstance(transposed, Node)
    if transposed.target is not aten.t.default:
        return None
    weight = transposed.args[0]
    assert isinstance(weight, Node)
    x, w = value_of(rows), value_of(weight)
    fits = x.device.type == "cpu" and x.dtype in DTYPES and w.dtype is x.dtype and w.is_contiguous()
    return _Product(node, rows, weight, transposed, bias) if fits and 0 < len(x) <= MAX_ROWS else None


FEW_ROW_PRODUCTS = Pass("few_row_products", few_row_products)
