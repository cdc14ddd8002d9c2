"""A graph cut behind its attentions: equal layers are equal segments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx import Graph

from specache_fx.capture.graph.segments import CannotCut, Segment, cut
from specache_fx.runtime.ops import SDPA

X, WEIGHTS = torch.randn(1, 2, 3, 8), [torch.randn(8, 8) for _ in range(4)]


def graph_of(num_layers: int, last_scale: float = 2.0) -> Graph:
    """Layers of a product and an attention; the last one multiplies by `last_scale`, the others by 2."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for i in range(num_layers):
            x = (x @ weights[i]) * (last_scale if i == num_layers - 1 else 2.0)
            x = F.scaled_dot_product_attention(x, x, x)
        return x + 1

    return graphs.traced(function, X, *WEIGHTS).graph


def segments(graph: Graph) -> list[Segment]:
    return cut(graph, lambda node: node.target is SDPA)


def test_each_segment_but_the_last_ends_with_an_attention() -> None:
    found = segments(graph_of(3))
    assert [each.nodes[-1].target is SDPA for each in found] == [True, True, True, False]
    assert all(each.results for each in found)


def test_layers_of_other_weights_are_equal() -> None:
    _, second, third, _ = (each.fingerprint() for each in segments(graph_of(3)))
    assert second == third
    _, second, third, _ = (each.fingerprint() for each in segments(graph_of(3, last_scale=3.0)))
    assert second != third


def test_marked_inputs_differ() -> None:
    _, second, third, _ = segments(graph_of(3))
    assert second.fingerprint([second.inputs[0]]) != third.fingerprint()


def test_a_segment_alone_computes_the_same() -> None:
    gm = graphs.traced(lambda x, y: (x * 2 + y) * y, torch.tensor(3.0), torch.tensor(4.0))
    _, _, *nodes, last, _ = gm.graph.nodes
    alone = Segment.of([*nodes, last]).graph(gm)
    assert [float(out) for out in alone(torch.tensor(3.0), torch.tensor(4.0))] == [40]


def test_a_graph_of_one_layer_is_not_cut() -> None:
    with pytest.raises(CannotCut):
        segments(graph_of(1))
