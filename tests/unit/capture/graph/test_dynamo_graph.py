"""Dynamo's graph before it is traced: which need gradients, and what a copy has in place of what Dynamo noted."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from specache_fx.capture.graph.dynamo_graph import needs_gradients, prepare
from specache_fx.capture.graph.graph_edit import copy_graph
from specache_fx.capture.graph.graph_utils import target_name


class Watched:
    """A backend that keeps graphs as they come, with gradients on, and how they are prepared."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.prepared: list[GraphModule] = []

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.prepared.append(prepare(copy_graph(gm)))  # here: Dynamo forgets sources afterwards
        return gm


def compiled(function: Any, *inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
    """The last graph of a function or module and that prepared; it is called once with each tuple of inputs."""
    torch._dynamo.reset()
    watched = Watched()
    made = torch.compile(function, backend=watched, **settings)
    for each in inputs:
        made(*each)
    torch._dynamo.reset()
    return watched.graphs[-1], watched.prepared[-1]


def calls(gm: GraphModule) -> list[str]:
    return [target_name(node) for node in gm.graph.nodes if node.op.startswith("call")]


X = torch.randn(2, 8)


def test_a_graph_needs_gradients_of_what_asks_for_them() -> None:
    layer = nn.Linear(8, 8)
    assert needs_gradients(compiled(layer, (X,))[0])
    with torch.no_grad():
        assert not needs_gradients(compiled(layer, (X,))[0])
    assert not needs_gradients(compiled(layer.requires_grad_(False), (X,))[0])
    returned_as_it_came = compiled(lambda x, w: (x * 2, w), (X, X.clone().requires_grad_()))
    assert not needs_gradients(returned_as_it_came[0])


def test_dropouts_that_are_off_are_gone_and_others_stay() -> None:
    gm, made = compiled(lambda x: F.dropout(F.dropout(F.dropout1d(x, 0.5, False), 0.0), 0.5, True), (X,))
    assert calls(gm) == ["dropout1d", "dropout", "dropout"]
    (left,) = (node for node in made.graph.nodes if node.op == "call_function")
    assert target_name(left) == "dropout" and left.args[1:] == (0.5, True)
    assert len(calls(gm)) == 3  # Dynamo goes on using its own


def test_modes_of_gradients_are_left_out() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.inference_mode():
            return y + 1

    with torch.no_grad():
        gm, made = compiled(forward, (X,))
    assert len(calls(gm)) > 2
    assert calls(made) == ["mul", "add"]


def test_attention_is_our_operator_with_all_of_its_arguments() -> None:
    q = torch.randn(1, 2, 3, 4)
    gm, made = compiled(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3), (q,))
    (node,) = (node for node in made.graph.nodes if node.op == "call_function")
    assert node.target is torch.ops.specache.scaled_dot_product_attention.default
    torch.testing.assert_close(made(q)[0], gm(q)[0])


class Scaled(nn.Module):
    """Two models of one class differ in a float and in a window."""

    def __init__(self, scale: float, window: int) -> None:
        super().__init__()
        self.scale, self.window = scale, window

    def forward(self, keys: Tensor, factor: float) -> Tensor:
        return keys[:, :, -self.window + 1 :, :] * self.scale * factor


def test_floats_and_windows_of_a_module_are_numbers_and_arguments_are_symbols() -> None:
    keys = torch.randn(1, 2, 30, 4)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        gm, made = compiled(Scaled(0.25, 16), (keys, 2.0), (keys, 3.0), dynamic=True)
    assert calls(gm).count("item") == 2
    (symbol, cut) = (
        each.graph.find_nodes(op="call_function", target=operator.getitem)[0] for each in (gm, made)
    )
    assert isinstance(symbol.args[1][2].start, torch.fx.Node)
    assert cut.args[1][2] == slice(-15, None, None)
    first, second = (node for node in made.graph.nodes if target_name(node) == "mul")
    assert first.args[1] == 0.25 and isinstance(second.args[1], torch.fx.Node)


def test_graphs_that_operators_take_are_prepared_too() -> None:
    def inner(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, False).exp()

    _, made = compiled(lambda x: checkpoint(inner, x, use_reentrant=False), (X,))
    (child,) = (child for _, child in made.named_children() if isinstance(child, GraphModule))
    assert calls(child) == ["exp"]
