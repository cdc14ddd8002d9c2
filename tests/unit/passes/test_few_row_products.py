"""`few_row_products`: the same numbers, each weight read once, by one call for the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import graphs
from support.captured import captured
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from specache_fx.capture.graph.simplify import simplify
from specache_fx.capture.program import Phase, Program
from specache_fx.config import SpecacheConfig
from specache_fx.passes.few_row_products import few_row_products
from specache_fx.passes.pipeline import DECODE_PASSES, run_passes
from specache_fx.runtime.native.products import is_products

aten = torch.ops.aten
STATE = Program(SpecacheConfig())


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    gm: GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    simplify(gm.graph)
    gm.recompile()
    return gm


def calls(gm: GraphModule) -> list[str]:
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    names = [getattr(node.target, "_opname", node.target.__name__) for node in nodes]
    return [
        f"{node.name} = {name}({', '.join(map(str, node.args))})"
        for node, name in zip(nodes, names, strict=True)
    ]


def count(gm: GraphModule, op: object) -> int:
    return len(graphs.nodes_of(gm, op))


def count_products(gm: GraphModule) -> int:
    return sum(is_products(node.target) for node in gm.graph.nodes)


def test_products_of_the_same_few_rows_are_one_call() -> None:
    def two(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        # Each linear layer has a view of its own of what it multiplies.
        return x.view(2, 5).mm(w.t()), torch.addmm(b, x.view(2, 5), v.t())

    inputs = (torch.randn(2, 1, 5), torch.randn(16, 5), torch.randn(3, 5), torch.randn(3))
    gm = few_row_products(traced(two, *inputs), STATE)
    assert calls(gm) == [
        "view = reshape(x_1, [2, 5])",
        "products = products(view, w_1, v_1)",
        "product = getitem(products, 0)",
        "product_1 = getitem(products, 1)",
        "biased = add(product_1, b_1)",
    ]
    torch.testing.assert_close(gm(*inputs), two(*inputs))


def test_more_weights_than_one_call_takes_are_shared_out() -> None:
    def many(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [x.mm(weight.t()) for weight in weights]

    inputs = (torch.randn(2, 5), *(torch.randn(out, 5) for out in range(1, 11)))
    gm = few_row_products(traced(many, *inputs), STATE)
    assert (count_products(gm), count(gm, aten.mm.default)) == (2, 0)
    torch.testing.assert_close(gm(*inputs), many(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_read_as_they_are(dtype: torch.dtype) -> None:
    def scaled(x: Tensor, w: Tensor, v: Tensor, s: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return x.mm(w.t().to(x.dtype)) * s, x.mm(v.t().to(x.dtype)), x.mm(u.t())

    w, v = torch.randint(-128, 128, (16, 5)).to(torch.int8), torch.randint(-128, 128, (3, 5)).to(torch.int8)
    inputs = (
        torch.randn(2, 5, dtype=dtype),
        w,
        v,
        torch.rand(16, dtype=dtype),
        torch.randn(4, 5, dtype=dtype),
    )
    gm = few_row_products(traced(scaled, *inputs), STATE)
    assert calls(gm) == [
        "products = products(x_1, w_1, v_1)",
        "product = getitem(products, 0)",
        "product_1 = getitem(products, 1)",
        "mul = mul(product, s_1)",
        "products_1 = products(x_1, u_1)",
    ]
    torch.testing.assert_close(gm(*inputs), scaled(*inputs))


def test_int8_weight_that_is_written_after_it_was_converted() -> None:
    def written(x: Tensor, w: Tensor) -> Tensor:
        converted = w.t().to(x.dtype)
        w.add_(3)
        return x.mm(converted)

    x, w = torch.randn(2, 8), torch.randint(-9, 9, (6, 8)).to(torch.int8)
    gm = few_row_products(traced(torch.func.functionalize(written), x, w.clone()), STATE)
    torch.testing.assert_close(gm(x, w.clone()), written(x, w.clone()))


@pytest.mark.parametrize(
    "chained",
    [
        lambda x, w, b: x.mm(w.t()).mm(w.t()),
        lambda x, w, b: torch.addmm(b, x, w.t()).mm(w.t()),
        lambda x, w, b: torch.addmm(x.mm(w.t()), x, w.t()),
        lambda x, w, b: x.mm(w.mm(w.t()).t()),
    ],
    ids=["rows", "biased rows", "bias", "weight"],
)
def test_product_of_a_product_is_replaced_too(chained: Callable[..., Tensor]) -> None:
    inputs = (torch.randn(5, 5), torch.randn(5, 5), torch.randn(5))
    gm = few_row_products(traced(chained, *inputs), STATE)
    assert (count(gm, aten.mm.default), count(gm, aten.addmm.default)) == (0, 0)
    torch.testing.assert_close(gm(*inputs), chained(*inputs))


@pytest.mark.parametrize("what", ["rows", "weight"])
def test_what_is_written_in_place_between_two_products_is_seen_by_the_second(what: str) -> None:
    def written(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = x.mm(w.t())
        (x if what == "rows" else w)[0].mul_(2)
        return first, x.mm(w.t())

    inputs = (torch.randn(2, 5), torch.randn(4, 5))
    wanted = written(*(x.clone() for x in inputs))
    gm = few_row_products(traced(torch.func.functionalize(written), *inputs), STATE)
    assert count_products(gm) == 2
    torch.testing.assert_close(gm(*(x.clone() for x in inputs)), wanted)


@pytest.mark.parametrize(
    ("products", "shapes"),
    [
        (lambda x, w, v: x.mm(w.t()) + x.mm((v * x.mm(w.t()).sum()).t()), [(2, 5), (4, 5), (4, 5)]),
        (lambda x, w, v: (x.view(2, 6).mm(w.t()), x.view(4, 3).mm(v.t())), [(12,), (4, 6), (4, 3)]),
    ],
    ids=["a weight that is computed after another product", "other rows of the same elements"],
)
def test_products_that_are_of_two_calls(products: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    gm = few_row_products(traced(products, *inputs), STATE)
    assert count_products(gm) == 2
    torch.testing.assert_close(gm(*inputs), products(*inputs))


ONES = torch.ones(2, 5), torch.ones(3, 5), torch.ones(3)


@pytest.mark.parametrize(
    ("product", "inputs"),
    [
        (lambda x, w: x.mm(w.t()), [torch.ones(33, 5), torch.ones(16, 5)]),
        (lambda x, w: x.mm(w.t()), [torch.ones(2, 5).double(), torch.ones(16, 5).double()]),
        (lambda x, w: x.mm(w.t()), [torch.ones(2, 5), torch.ones(5, 16).t()]),
        (lambda x, w: x.mm(w.t()), [torch.ones(2, 0), torch.ones(16, 0)]),
        (lambda x, w, b: torch.addmm(b, x, w.t()), [each.bfloat16() for each in ONES]),
        (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2), [*ONES]),
    ],
    ids=["many rows", "float64", "columns", "nothing to sum", "a bias in bfloat16", "a bias beside a scale"],
)
def test_other_products_are_left_as_they_are(product: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    gm = traced(product, *inputs)
    before = graphs.code(gm)
    assert graphs.code(few_row_products(gm, STATE)) == before


def test_decode_graph_reads_each_weight_of_a_layer_once() -> None:
    decode = captured("llama")[Phase.DECODE]
    gm, program = graphs.decode_graph(decode, SpecacheConfig(group_size=4, residual_length=4, top_k=4))
    gm = run_passes(gm, program, DECODE_PASSES)
    assert (count(gm, aten.bmm.default), count(gm, aten.mm.default)) == (0, 0)
    calls_of_weights = [len(node.args) - 1 for node in gm.graph.nodes if is_products(node.target)]
    assert calls_of_weights == [3, 1, 2, 1, 1]  # q, k, v; output; gate, up; down; logits


def test_products_of_tokens_that_follow_a_cache_are_the_operators_however_many_there_are() -> None:
    linear = torch.nn.functional.linear

    def layer(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = linear(x, w), linear(x, v, b)
        x.mul_(2)
        return *first, linear(x, w)

    inputs = (torch.randn(2, 3, 5), torch.randn(16, 5), torch.randn(3, 5), torch.randn(3))
    torch._dynamo.mark_dynamic(inputs[0], 1)
    (captured,) = graphs.capture(graphs.FunctionModule(layer), lambda forward: forward(*inputs))
    gm = few_row_products(captured.copy(), STATE)
    assert (count_products(gm), count(gm, aten.mm.default), count(gm, aten.addmm.default)) == (2, 0, 0)
    for tokens in (3, 40):
        x = torch.randn(2, tokens, 5)
        given = [tokens if isinstance(value, int) else value for value in captured.inputs]
        given = [x.clone() if getattr(value, "ndim", 0) == 3 else value for value in given]
        torch.testing.assert_close(gm(*given), layer(x.clone(), *inputs[1:]))
