"""Equal calls become one, where that changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import graphs
from support.zoo import build
from torch import Tensor
from torch.fx import GraphModule

from specache_fx.config import SpecacheConfig
from specache_fx.passes.base import PassState, Phase
from specache_fx.passes.equal_nodes import merge_equal_nodes
from specache_fx.passes.graph_utils import placeholders, target_name
from specache_fx.passes.pipeline import CAPTURE_PASSES, run_passes


def captured(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    (graph,) = graphs.capture(graphs.FunctionModule(function), lambda forward: forward(*inputs))
    return graph.copy()


@torch.no_grad()  # a graph that sets the mode leaves it so
def merged(function: Callable[..., Any], *inputs: Tensor) -> Counter[str]:
    """The calls that are left; the graph computes what the function does."""
    gm = captured(function, *inputs)
    merge_equal_nodes(gm.graph, set(gm.graph.nodes))
    gm.graph.lint()
    gm.recompile()
    wanted = function(*(x.clone() for x in inputs))
    for got, expected in zip(gm(*inputs), wanted, strict=True):
        assert torch.equal(got, expected)
        assert got.dtype is expected.dtype
    return Counter(target_name(node) for node in gm.graph.nodes if node.op.startswith("call"))


def test_equal_calls_become_one_and_so_do_those_that_read_them() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.unsqueeze(1).cos(), x.unsqueeze(1).cos()
        return a + 1, b * 2

    assert merged(function, torch.randn(3)) == Counter(unsqueeze=1, cos=1, add=1, mul=1)


def test_numbers_of_other_types_are_other_calls() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x + 1).clone(), (x + 1.0).clone()

    assert merged(function, torch.arange(3)) == Counter(add=2, clone=2)


def test_keywords_tell_calls_apart() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = x.sum(dim=0), x.sum(dim=0, keepdim=True), x.sum(dim=0)
        return a + 1, b + 1, c + 2

    assert merged(function, torch.randn(3, 4)) == Counter(sum=2, add=3)


def test_what_is_written_to_is_not_shared() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.clone(), x.clone()
        a.add_(1)
        return a * 2, b * 2

    assert merged(function, torch.randn(3))["clone"] == 2


def test_what_is_returned_is_not_shared() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    assert merged(function, torch.randn(3)) == Counter(clone=2)


def test_views_of_what_is_returned_are_not_shared() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.clone(), x.clone()
        return a.view(-1), b.view(-1)

    assert merged(function, torch.randn(3, 4)) == Counter(clone=2, view=2)


def test_calls_without_a_result_stay() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            a = x.cos()
        a = a + 1
        with torch.enable_grad():
            b = x.sin()
        return a * 2, b + 1

    assert merged(function, torch.randn(3))["_set_grad_enabled"] == 4


def test_levels_of_vmap_are_left_alone() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (torch.vmap(lambda row: row.sum())(x) for _ in range(2))
        return a + 1, b + 2

    assert merged(function, torch.randn(3, 4))["sum"] == 2


def test_only_what_is_asked_for_is_merged() -> None:
    gm = captured(lambda x: (x.cos() + 1, x.cos() + 2), torch.randn(3))
    assert merge_equal_nodes(gm.graph, set()) == set()
    two = [node for node in gm.graph.nodes if target_name(node) == "cos"]
    assert merge_equal_nodes(gm.graph, {two[0]}) == set()
    assert merge_equal_nodes(gm.graph, set(two)) == {two[1]}


@pytest.mark.parametrize("num_layers", [1, 3])
def test_rotations_come_into_a_decode_graph_once(num_layers: int) -> None:
    llama = build("llama", num_hidden_layers=num_layers).requires_grad_(False)
    graph = graphs.by_phase(graphs.capture(llama, graphs.drive_transformers))[Phase.DECODE]
    state = PassState(SpecacheConfig(group_size=4, residual_length=4, top_k=4))
    gm = run_passes(graph.copy(), state, CAPTURE_PASSES)
    entries = [node for node in placeholders(gm.graph) if "specache_prelude" in node.meta]
    assert len(entries) == 2
    assert state.prelude is not None
    assert len(state.prelude(graph.inputs, 1)) == 2
