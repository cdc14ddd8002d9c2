"""Reasons for one lane that a graph alone shows: what it does besides its results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx import Graph

from specache_fx.capture.positions.lanes import effect_of


def traced(function: Callable[[Tensor], Tensor]) -> Graph:
    (taken,) = graphs.capture(graphs.FunctionModule(function), lambda model: model(torch.ones(4)))
    return taken.copy().graph


def add_to_it(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def check(x: Tensor) -> Tensor:
    torch._assert_async(x.sum() > 0)
    return x * 2


def test_a_graph_that_only_computes_has_no_effect() -> None:
    graph = traced(lambda x: x.softmax(0) * 2)
    assert effect_of(graph) is None


def test_a_state_that_is_written_is_named() -> None:
    (name,) = (node.name for node in traced(add_to_it).nodes if node.op == "placeholder")
    assert effect_of(traced(add_to_it)) == f"the model updates a state of its own (`{name}`)"


def test_a_call_without_a_result_counts_unless_it_is_taken_out() -> None:
    graph = traced(check)
    (call,) = (node for node in graph.nodes if "_assert_async" in str(node.target))
    assert effect_of(graph) == f"the model calls `{call.name}` for its effect"
    assert effect_of(graph, outside=[call]) is None


@pytest.mark.parametrize(
    "draw",
    [lambda x: F.dropout(x, 0.5, True), lambda x: x + torch.rand_like(x), lambda x: torch.bernoulli(x / 2)],
    ids=["dropout", "rand_like", "bernoulli"],
)
def test_random_numbers_are_named_as_that(draw: Callable[[Tensor], Tensor]) -> None:
    graph = traced(draw)
    reason = "the model draws random numbers (`{}`), and would draw more of them"
    assert effect_of(graph) in {
        reason.format(node.name) for node in graph.nodes if node.op == "call_function"
    }
