"""Copying and cleaning FX graphs."""

from __future__ import annotations

from typing import Any

import torch
from support import graphs
from torch import Tensor, fx

from specache_fx.passes.graph_edit import copy_graph, finish
from specache_fx.passes.graph_slices import eliminate_dead_code
from specache_fx.passes.graph_utils import target_name
from specache_fx.runtime import ops  # noqa: F401  (registers torch.ops.specache)


def traced(function: Any) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def names(gm: fx.GraphModule) -> list[str]:
    return [target_name(node) for node in gm.graph.nodes if node.op.startswith("call")]


def cleaned(function: Any, *args: Any) -> list[str]:
    """What is left; the result must be what it was."""
    gm = traced(function)
    expected = gm(*(arg.clone() for arg in args))
    eliminate_dead_code(gm.graph)
    finish(gm)
    assert torch.equal(gm(*(arg.clone() for arg in args)), expected)
    return names(gm)


def test_dead_code_goes() -> None:
    def function(x: Tensor) -> Tensor:
        x.sin().cos()
        return x.exp()

    assert cleaned(function, torch.ones(2)) == ["exp"]


def test_in_place_method_on_a_live_tensor_stays() -> None:
    def function(x: Tensor) -> Tensor:
        buffer = x.new_zeros(3, 2)
        buffer.copy_(x)
        return buffer.exp()

    assert cleaned(function, torch.ones(2)) == ["new_zeros", "copy_", "exp"]


def test_in_place_method_on_a_view_of_a_live_tensor_stays() -> None:
    def function(x: Tensor) -> Tensor:
        buffer = x.new_zeros(3, 2)
        buffer.view(2, 3)[1].add_(x.sum())
        return buffer.exp()

    assert "add_" in cleaned(function, torch.ones(2))


def test_item_assignment_into_a_live_tensor_stays() -> None:
    def function(x: Tensor) -> Tensor:
        buffer = torch.zeros(3, 2)
        buffer[1] = x
        return buffer.exp()

    gm = fx.GraphModule({}, _assigning())
    expected = gm(torch.ones(2))
    eliminate_dead_code(gm.graph)
    finish(gm)
    assert torch.equal(gm(torch.ones(2)), expected)
    assert torch.equal(expected, function(torch.ones(2)))


def _assigning() -> fx.Graph:
    import operator

    graph = fx.Graph()
    x = graph.placeholder("x")
    buffer = graph.call_function(torch.zeros, (3, 2))
    graph.call_function(operator.setitem, (buffer, 1, x))
    graph.output(graph.call_method("exp", (buffer,)))
    return graph


def test_in_place_method_through_a_chunk_of_a_live_tensor_stays() -> None:
    def function(x: Tensor) -> Tensor:
        buffer = x.new_zeros(4)
        buffer.chunk(2)[0].add_(x)
        return buffer.exp()

    assert "add_" in cleaned(function, torch.ones(2))


def test_in_place_method_through_select_of_a_live_tensor_stays() -> None:
    def function(x: Tensor) -> Tensor:
        buffer = x.new_zeros(3, 2)
        buffer.select(0, 1).add_(x)
        buffer.narrow(0, 0, 1).mul_(2)
        return buffer.exp()

    left = cleaned(function, torch.ones(2))
    assert {"add_", "mul_"} <= set(left)


def test_in_place_method_on_a_dead_tensor_goes() -> None:
    def function(x: Tensor) -> Tensor:
        x.new_zeros(2).add_(x)
        return x.exp()

    assert cleaned(function, torch.ones(2)) == ["exp"]


def test_operator_of_ours_that_changes_a_session_stays_though_nothing_reads_it() -> None:
    graph = fx.Graph()
    key, state = graph.placeholder("key"), graph.placeholder("state")
    graph.call_function(torch.ops.specache.append.default, (key, key, state, 0))
    graph.call_function(torch.ops.specache.attention.default, (key, key, key, 0, 1.0))  # pure: may go
    graph.output(key)
    eliminate_dead_code(graph)
    assert names(fx.GraphModule({}, graph)) == ["append.default"]


def test_copy_has_its_own_nodes_and_meta() -> None:
    (captured,) = graphs.capture(torch.nn.Linear(2, 2), lambda forward: forward(torch.ones(1, 2)))
    copied = copy_graph(captured.gm)
    assert graphs.code(copied) == graphs.code(captured.gm)
    assert not set(copied.graph.nodes) & set(captured.gm.graph.nodes)
    for node in copied.graph.nodes:
        node.meta["specache_mark"] = 1
    assert not any("specache_mark" in node.meta for node in captured.gm.graph.nodes)
