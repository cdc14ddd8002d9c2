"""A recorded graph computes what the function does, for other sizes too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from specache_fx.capture.graph.recorder import NotDirect, Recorder
from specache_fx.capture.graph.trace import trace
from specache_fx.runtime.ops import SDPA

LIBRARY = "recorded"


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """One that writes to its input and returns nothing."""
    library = torch.library.Library(LIBRARY, "DEF")
    library.define("bump(Tensor(a!) x) -> ()")
    library.impl("bump", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")
    torch.library.register_fake(f"{LIBRARY}::bump", lambda x: None, lib=library)
    yield
    library._destroy()


def recorded(function: Callable[..., Any], shape: Sequence[int] = (3, 8)) -> GraphModule:
    """The graph of a function of a length, and of a tensor with that many rows."""
    env = ShapeEnv()
    source = ConstantSource("rows")
    symbol = env.create_symbol(shape[0], source, dynamic_dim=DimDynamic.DYNAMIC)
    rows = env.create_symintnode(symbol, hint=shape[0], source=source)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(rows, *shape[1:])
    with torch.no_grad(), mode, enable_python_dispatcher(), Recorder([rows, x]) as recorder:
        out = function(x)
    return recorder.finish([out])


def bumped(x: Tensor) -> Tensor:
    y = x * 2
    torch.ops.recorded.bump(y)
    return y


def filled(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0] + 1, 8)
    y[1:, 2:] = x[:, 2:]
    y[-1].mul_(3)
    return y


def cast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        half = x @ x.T
        with torch.autocast("cpu", enabled=False):
            whole = x @ x.T
    return half.float() + whole * 2


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sizes": lambda x: x.view(x.shape[0] * 2, -1).mean(1)[: x.size(0) // 2 + 1] * x.numel(),
    "constants": lambda x: (
        2 - x / x.shape[-1] + (1.5 * x) ** 2 + 1 / (x + 9) - 3**x // 2 + 7 % (x + 9) + (x > 0)
    ),
    "factories": lambda x: torch.arange(x.shape[0])[:, None] * x + torch.full_like(x, 2.0) + x.new_ones(8),
    "types": lambda x: x.to(float) + torch.zeros(x.shape[0], 1, dtype=int) + x.new_ones(8, dtype=bool),
    "properties": lambda x: x.T.mT @ x.mT,
    "lists": lambda x: torch.cat([x.split(4, -1)[1], *x.chunk(2, dim=-1), x.unbind(-1)[0][:, None]], dim=1),
    "named": lambda x: F.layer_norm(x, normalized_shape=(8,), eps=0.1) + x.max(dim=-1, keepdim=True).values,
    "methods": lambda x: x.softmax(-1).masked_fill(x > 0, -1.0).to(torch.float64).type_as(x),
    "dropout": lambda x: F.dropout(x, 0.5, training=False) + 1,
    "operators": lambda x: torch.ops.aten.add.Tensor(x, x) * torch.ops.aten.relu(x),
    "in place": filled,
    "without a result": bumped,
    "autocast": cast,
}


def test_an_autocast_that_ends_in_the_callers() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            whole = x @ x.T
        return whole + x @ x.T

    x = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        gm = recorded(function)
        traced, expected = trace(gm), function(x)
        assert torch.equal(gm(5, x)[0], expected)
    assert torch.equal(traced(5, x)[0], expected)  # its casts are operators


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_sizes_give_what_the_function_does(name: str) -> None:
    function = FUNCTIONS[name]
    gm = recorded(function)
    traced = trace(gm)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 8)
        expected = function(x.clone())
        for each in (gm, traced):
            torch.testing.assert_close(each(rows, x.clone())[0], expected, atol=1e-5, rtol=1e-5)


def test_attention_stays_one_call() -> None:
    def function(x: Tensor) -> Tensor:
        heads = x.view(1, 1, *x.shape)
        return F.scaled_dot_product_attention(heads, heads, value=heads, scale=0.5)

    gm = recorded(function)
    assert len(gm.graph.find_nodes(op="call_function", target=SDPA)) == 1
    x = torch.randn(5, 8)
    torch.testing.assert_close(gm(5, x)[0], function(x))


def test_a_result_that_is_its_argument() -> None:
    def function(x: Tensor) -> Tensor:
        return x.contiguous().to(torch.float32) + x.view_as(x)

    x = torch.randn(4, 8)
    torch.testing.assert_close(recorded(function)(4, x)[0], function(x))


def set_data(x: Tensor) -> Tensor:
    y = x * 1
    y.data = x * 2
    return y


CONSTANT = torch.ones(8)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x + CONSTANT, "no parameter, buffer or argument"),
        (torch.vmap(lambda row: row.sum()), "no parameter, buffer or argument"),
        (lambda x: (x * 1).unsqueeze_(0), "unsqueeze_ changes a tensor's shape"),
        (lambda x: x + CONSTANT.tolist()[0], "no parameter, buffer or argument"),
        (lambda x: x + float(x.numpy().size), "numpy reads a tensor's numbers"),
        (set_data, "__set__ changes a tensor's shape"),
    ],
    ids=("constant", "vmap", "shape in place", "list", "numpy", "data"),
)
def test_what_has_no_place_in_a_graph_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(NotDirect, match=reason):
        recorded(function)
