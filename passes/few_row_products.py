"""`few_row_products`: up to 32 rows times weights, each weight read once, as fast as memory gives it.

    p = aten.mm(x, aten.t(w)); q = aten.addmm(b, x, aten.t(v))        # x [2, in], w [out, in], v [other_out, in]
        -> p, m = specache.products(x, w, v); q = aten.add(m, b)

A decode step has a row or two for each sequence and is bound by reading the weights. BLAS takes a few rows for a
general product, whose packing costs more than the arithmetic. With a single row it reads the weight slower than memory
gives it (`runtime/csrc/products.cpp`). Products of the same rows whose weights are inputs of the graph are one
call, up to 8 of them: the graph writes to no weight before its end.

Tokens that follow a cache may be few, too: a question about a document. Where their number is known when the graph runs
alone, the operator takes all products and leaves many rows to BLAS. A prompt, whose products arithmetic bounds, does
without this pass.

It matches float32 on the CPU, and bfloat16 without a bias; weights that lie row by row. In a decode step it also
matches weights in int8. torchao converts them to the rows' dtype, multiplies, and scales the results.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.graph.graph_utils import value_of
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass
from specache_fx.runtime import ops  # noqa: F401  (defines the operator)
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.native.products import DTYPES, MAX_ROWS, MAX_WEIGHTS

aten = torch.ops.aten


@partial(Pass, optional=True)
def few_row_products(gm: GraphModule, program: Program) -> None:
    """Make one call of all products of the same few rows."""
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and _fits(node):
            rows, weight = node.args[-2], _weight(node)
            same = (_viewed(rows), value_of(weight).dtype, *map(str, value_of(rows).shape))
            # A weight that is computed is not there yet where another product of the same rows is.
            groups[same if weight.op == "placeholder" else (*same, node)].append(node)
    if groups:
        graph_ops.load()
    for products in groups.values():
        for first in range(0, len(products), MAX_WEIGHTS):
            _replace(gm, products[first : first + MAX_WEIGHTS])


def _replace(gm: GraphModule, products: list[Node]) -> None:
    graph, first = gm.graph, products[0]
    # Operands are read when they are needed: one that was a product may be another call's result by then.
    with graph.inserting_before(first):
        overload = getattr(torch.ops.specache.products, f"of{len(products)}")
        outs = [call(graph, overload, (first.args[-2], *map(_weight, products)), first, "products")]
        if len(products) > 1:
            outs = [
                call(graph, operator.getitem, (outs[0], i), node, "product")
                for i, node in enumerate(products)
            ]
    for node, out in zip(products, outs, strict=True):
        with graph.inserting_before(node):
            is_biased = node.target is aten.addmm.default
            whole = call(graph, aten.add.Tensor, (out, node.args[0]), node, "biased") if is_biased else out
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _weight(product: Node) -> Any:
    """The weight that a product's last operand is the transpose of, in its dtype or int8; None of another operand."""
    matrix: Any = product.args[-1]
    if matrix.target is aten._to_copy.default and value_of(matrix.args[0]).dtype is torch.int8:
        matrix = matrix.args[0]  # bfloat16 holds each number of int8
    return matrix.args[0] if matrix.target is aten.t.default else None


def _viewed(node: Any) -> Any:
    """The tensor below a chain of views that keep the elements' order."""
    while node.target is aten.reshape.default:
        node = node.args[0]
    return node


def _fits(product: Node) -> bool:
    """Whether the operator computes a product."""
    x, w = value_of(product.args[-2]), value_of(_weight(product))
    if product.kwargs or w is None or not w.is_contiguous() or w.shape[1] == 0:
        return False
    if x.device.type != "cpu" or x.dtype not in DTYPES or w.dtype not in (x.dtype, torch.int8):
        return False
    if product.target is aten.addmm.default and x.dtype is torch.bfloat16:
        return False  # it would be rounded twice
    if isinstance(
        x.shape[0], torch.SymInt
    ):  # of many rows it would convert weights in int8 no faster than the graph
        return bool(w.dtype == x.dtype)
    return bool(0 < x.shape[0] <= MAX_ROWS)
