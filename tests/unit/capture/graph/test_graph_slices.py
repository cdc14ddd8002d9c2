"""Parts of a graph: what a node needs, and what is computed apart gives the same numbers."""

from __future__ import annotations

import torch
from support import graphs
from support.captured import captured
from torch import Tensor

from specache_fx.capture.graph.graph_slices import (
    ancestors,
    cut_out,
    extract,
    has_effect,
    mutated_inputs,
    writes_in_place,
)
from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.capture.program import Phase

aten = torch.ops.aten


def test_ancestors_end_at_the_nodes_that_stop_them() -> None:
    gm = captured("tiny")[Phase.DECODE].copy()
    first, second = graphs.nodes_of(gm, torch.ops.specache.scaled_dot_product_attention.default)
    query = first.args[0]
    assert {first, query} <= ancestors([second])
    stopped = ancestors([second], [first])
    assert first in stopped and query not in stopped


class Counts(torch.nn.Module):
    """Adds to a buffer, and to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)
        doubled = x * 2
        return doubled + self.count, doubled * y


def counts() -> tuple[torch.fx.GraphModule, tuple[object, ...]]:
    (taken,) = graphs.capture(Counts(), lambda model: model(torch.ones(3), torch.full((3,), 5.0)))
    return taken.copy(), taken.inputs


def test_a_part_takes_its_own_inputs_alone_and_computes_the_same() -> None:
    gm, inputs = counts()
    (result,) = (out for out in gm.graph.output_node().args[0] if out.target is aten.mul.Tensor)
    part = cut_out(gm, [result])
    assert len(part.inputs) == 2 < len(placeholders(gm.graph))
    (found,) = part(inputs)
    assert found.tolist() == [10, 10, 10]


def test_a_graph_of_its_own_begins_at_any_nodes() -> None:
    gm, _ = counts()
    (result,) = (out for out in gm.graph.output_node().args[0] if out.target is aten.mul.Tensor)
    doubled, y = result.args
    alone = extract(gm, [result, doubled], [y, doubled])
    assert [node.name for node in placeholders(alone.graph)] == [y.name, doubled.name]
    product, same = alone(torch.full((3,), 3.0), torch.full((3,), 4.0))
    assert product.tolist() == [12, 12, 12] and same.tolist() == [4, 4, 4]


def test_what_is_written_in_place_is_an_input_that_is_kept() -> None:
    gm, _ = counts()
    (written,) = mutated_inputs(gm.graph)
    assert "count" in written.name
    writes = [node for node in gm.graph.nodes if writes_in_place(node)]
    assert [node.args[0] for node in writes] == [written] and all(map(has_effect, writes))
    assert not any(has_effect(node) for node in graphs.nodes_of(gm, aten.mul.Tensor))
