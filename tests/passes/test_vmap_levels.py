"""Masks that a model computes under `torch.vmap`: its levels live as long as what runs in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from specache_fx.passes.graph_edit import copy_graph
from specache_fx.passes.graph_slices import eliminate_dead_code, extract
from specache_fx.passes.graph_utils import output_node, placeholders, target_name


def captured() -> tuple[GraphModule, tuple[Tensor, ...]]:
    """Dynamo's graph of a causal mask over two vmapped levels, and its inputs."""
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def mask(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.vmap(torch.vmap(lambda q, k: q >= k, (None, 0)), (0, None))(queries, keys)

    inputs = (torch.arange(3), torch.arange(5))
    torch._dynamo.reset()
    torch.compile(mask, backend=backend)(*inputs)
    return graphs[0], inputs


def test_levels_are_kept_with_what_runs_in_them() -> None:
    gm, inputs = captured()
    expected = inputs[0][:, None] >= inputs[1]
    copy = copy_graph(gm)
    eliminate_dead_code(copy.graph)
    copy.recompile()
    assert torch.equal(copy(*inputs)[0], expected)
    results = output_node(gm.graph).all_input_nodes
    cut = extract(gm, results, placeholders(gm.graph), reader=output_node(gm.graph))
    assert torch.equal(cut(*inputs)[0], expected)


def test_levels_go_with_what_ran_in_them() -> None:
    gm, _ = captured()
    copy = copy_graph(gm)
    output_node(copy.graph).args = ((placeholders(copy.graph)[0],),)
    eliminate_dead_code(copy.graph)
    assert {target_name(node) for node in copy.graph.nodes} == {"placeholder", "output"}
