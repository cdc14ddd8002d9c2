"""Copying and cleaning FX graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import graphs
from torch import Tensor, fx

from specache_fx.capture.graph.graph_edit import copy_graph
from specache_fx.capture.graph.graph_slices import constant_of, draws_random_numbers, eliminate_dead_code
from specache_fx.capture.graph.graph_utils import concatenated, placeholders, target_name
from specache_fx.runtime import ops  # noqa: F401  (registers torch.ops.specache)


def names(gm: fx.GraphModule) -> list[str]:
    return [target_name(node) for node in gm.graph.nodes if node.op.startswith("call")]


def test_operator_of_ours_that_changes_a_session_stays_though_nothing_reads_it() -> None:
    graph = fx.Graph()
    key, state = graph.placeholder("key"), graph.placeholder("state")
    graph.call_function(torch.ops.specache.append.default, (key, key, state, 0))
    graph.call_function(torch.ops.specache.attention.default, (key, key, key, 1.0))  # pure: may go
    graph.output(key)
    eliminate_dead_code(graph)
    assert names(fx.GraphModule({}, graph)) == ["append"]


def test_copy_has_its_own_nodes_and_meta() -> None:
    (captured,) = graphs.capture(torch.nn.Linear(2, 2), lambda forward: forward(torch.ones(1, 2)))
    copied = copy_graph(captured.gm)
    assert graphs.code(copied) == graphs.code(captured.gm)
    assert not set(copied.graph.nodes) & set(captured.gm.graph.nodes)
    for node in copied.graph.nodes:
        node.meta["specache_mark"] = 1
    assert not any("specache_mark" in node.meta for node in captured.gm.graph.nodes)


def functional(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """A function's graph as passes get it."""
    (captured,) = graphs.capture(graphs.FunctionModule(function), lambda forward: forward(*args))
    return captured.copy()


def test_dead_code_goes_and_random_numbers_stay() -> None:
    def function(x: Tensor) -> Tensor:
        x.sin().cos()
        torch.rand_like(x)
        return x.exp()

    assert names(functional(function, torch.ones(2))) == ["rand_like", "exp"]


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
    gm = functional(lambda x: join(x).exp(), torch.ones(2, 3))
    found = [parts for node in gm.graph.nodes if (parts := concatenated(node)) is not None]
    assert [([part.op for part in parts], dim) for parts, dim in found] == [(["placeholder"] * 2, 1)]


def test_a_constant_is_what_it_was_when_it_was_read() -> None:
    def function(x: Tensor) -> Tensor:
        factor = torch.ones(1) * 0.5
        first = x * factor
        factor.mul_(3)
        return first + x.sub(factor)

    gm = functional(function, torch.ones(2))
    nodes = {target_name(node): node for node in gm.graph.nodes}
    read = [node.args[1] for node in gm.graph.nodes if node.all_input_nodes[:1] == placeholders(gm.graph)]
    assert [constant_of(gm, factor) for factor in read] == [0.5, 1.5]
    assert constant_of(gm, nodes["add"]) is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_attention_with_dropout_draws_random_numbers(dropout: float) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    gm = functional(lambda x: attend(x, x, x, dropout_p=dropout), torch.ones(1, 1, 2, 8))
    assert any(map(draws_random_numbers, gm.graph.nodes)) == bool(dropout)
