"""Copying and cleaning FX graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import graphs
from torch import Tensor, fx

from specache_fx.config import SpecacheConfig
from specache_fx.passes.base import PassState
from specache_fx.passes.graph_edit import copy_graph, finish
from specache_fx.passes.graph_slices import constant_of, eliminate_dead_code
from specache_fx.passes.graph_utils import concatenated, output_node, target_name
from specache_fx.passes.normalize_calls import NORMALIZE_CALLS
from specache_fx.passes.randomness import draws_random_numbers
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


def captured(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """Dynamo's graph of a function."""

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    (graph,) = graphs.capture(Module(), lambda forward: forward(*args))
    return graph.gm


@pytest.mark.parametrize(
    "join",
    [
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: torch.concat([x, x], axis=1),
        lambda x: torch.concatenate(tensors=[x, x], axis=-1),
    ],
    ids=["place", "dim", "axis", "keywords"],
)
def test_a_cat_is_known_however_it_is_spelt(join: Callable[[Tensor], Tensor]) -> None:
    state = PassState(SpecacheConfig())
    gm = NORMALIZE_CALLS.run(captured(lambda x: join(x).exp(), torch.ones(2, 3)), state)
    found = [parts for node in gm.graph.nodes if (parts := concatenated(node)) is not None]
    assert [([part.op for part in parts], dim) for parts, dim in found] == [(["placeholder"] * 2, 1)]


def test_a_constant_is_what_it_was_when_it_was_read() -> None:
    def function(x: Tensor) -> Tensor:
        factor = torch.ones(1) * 0.5
        first = x * factor
        factor.mul_(3)
        return first + x.sub(factor)

    gm = captured(function, torch.ones(2))
    nodes = {target_name(node): node for node in gm.graph.nodes}
    factor = nodes["sub"].args[1]
    first = next(node for node in factor.users if target_name(node) == "mul")
    assert constant_of(gm, factor, first) == 0.5
    assert constant_of(gm, factor, nodes["sub"]) == 1.5
    assert constant_of(gm, factor, output_node(gm.graph)) == 1.5


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_attention_with_dropout_draws_random_numbers(dropout: float) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    gm = captured(lambda x: attend(x, x, x, dropout_p=dropout), torch.ones(1, 1, 2, 8))
    assert any(map(draws_random_numbers, gm.graph.nodes)) == bool(dropout)
