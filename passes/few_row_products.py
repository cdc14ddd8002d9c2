"""`few_row_products`: up to 32 rows times weights, each weight read once, as fast as memory gives it.

    p = aten.mm(x, aten.t(w)); q = aten.addmm(b, x, aten.t(v))        # x [2, in], w [out, in], v [other_out, in]
        -> p, m = specache.products(x, w, v); q = aten.add(m, b)

A decode step has a row or two for each sequence and is bound by reading the weights. BLAS takes a few rows for a
general product, whose packing costs more than the arithmetic. With a single row it reads the weight slower than memory
gives it (`runtime/csrc/products.cpp`). Products of the same rows whose weights are inputs of the graph are one
call, up to 8 of them: the graph writes to no weight before its end.

Tokens that follow a cache may be few, too: a question about a document. Their number is known when the graph runs. So
the operator takes all products of such a graph and leaves many rows to BLAS. A prompt keeps its products: arithmetic
bounds them.

It matches float32 on the CPU, and bfloat16 without a bias; weights that lie row by row. In a decode step it also
matches weights in int8. torchao converts them to the rows' dtype, multiplies, and scales the results.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_edit import call, erase_unused, finish
from specache_fx.capture.graph_utils import value_of
from specache_fx.capture.program import Phase, Program
from specache_fx.passes.base import Pass
from specache_fx.runtime import ops  # noqa: F401  (defines the operator)
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.native.products import DTYPES, MAX_ROWS, MAX_WEIGHTS

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def few_row_products(gm: GraphModule, program: Program) -> GraphModule:
    """Make one call of all products of the same few rows."""
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.target not in (aten.mm.default, aten.addmm.default) or not _fits(node, program.phase):
            continue
        rows, weight, _ = _operands(node)
        same = (_viewed(rows), value_of(weight).dtype, *map(str, value_of(rows).shape))
        # A weight that is computed is not there yet where another product of these rows is.
        groups[same if weight.op == "placeholder" else (*same, node)].append(node)
    if groups:
        graph_ops.load()
    for products in groups.values():
        for first in range(0, len(products), MAX_WEIGHTS):
            _replace(gm, products[first : first + MAX_WEIGHTS])
    return finish(gm) if groups else gm


def _replace(gm: GraphModule, products: list[Node]) -> None:
    graph, first = gm.graph, products[0]
    # Operands are read when they are needed: one that was a product may be another call's result by then.
    with graph.inserting_before(first):
        arguments = (_operands(first)[0], *(_operands(node)[1] for node in products))
        overload = getattr(torch.ops.specache.products, f"of{len(products)}")
        outs = [call(graph, overload, arguments, first, "products")]
        if len(products) > 1:
            outs = [
                call(graph, operator.getitem, (outs[0], i), node, "product")
                for i, node in enumerate(products)
            ]
    for node, out in zip(products, outs, strict=True):
        rows, weight, bias = _operands(node)
        with graph.inserting_before(node):
            whole = out if bias is None else call(graph, aten.add.Tensor, (out, bias), node, "biased")
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        for transposed in list(weight.users):
            for converted in list(transposed.users):
                erase_unused(converted, (aten._to_copy.default,))
            erase_unused(transposed, (aten.t.default,))
        erase_unused(rows, _VIEWS)


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """Rows, weight and bias (or None) of a product; the weight is no node where it is no transposed one."""
    *biases, rows, matrix = node.args
    if _converts(matrix):
        matrix = matrix.args[0]  # bfloat16 holds each number of int8
    weight = matrix.args[0] if isinstance(matrix, Node) and matrix.target is aten.t.default else None
    return rows, weight, biases[0] if biases else None


def _converts(node: Any) -> TypeGuard[Node]:
    """Whether a node makes other numbers of a weight in int8."""
    if not isinstance(node, Node) or node.target is not aten._to_copy.default:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    return value_of(source).dtype is torch.int8


def _viewed(node: Node) -> Node:
    """The tensor below a chain of views that keep the elements' order."""
    while node.target in _VIEWS:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _fits(node: Node, phase: Phase) -> bool:
    """Whether the operator computes a product. In an extend graph the number of rows is unknown."""
    rows, weight, bias = _operands(node)
    if node.kwargs or not isinstance(rows, Node) or not isinstance(weight, Node):
        return False
    x, w = value_of(rows), value_of(weight)
    if x.device.type != "cpu" or x.dtype not in DTYPES or w.dtype not in (x.dtype, torch.int8):
        return False
    if not w.is_contiguous():
        return False
    # Of more rows the operator would convert weights in int8 no faster than the graph does.
    few = w.dtype == x.dtype if phase is Phase.EXTEND else 0 < x.shape[0] <= MAX_ROWS
    # With a bias, bfloat16 would be rounded twice.
    return bool(few) and w.shape[1] > 0 and not (bias is not None and x.dtype is torch.bfloat16)


def _of_turns(gm: GraphModule, program: Program) -> GraphModule:
    return few_row_products(gm, program) if program.phase is Phase.EXTEND else gm


FEW_ROW_PRODUCTS = Pass("few_row_products", few_row_products, optional=True)
PRODUCTS_OF_TURNS = Pass("few_row_products", _of_turns, optional=True)
"""Among the passes that each captured graph goes through."""
