"""Parts of a graph that only move elements: where they begin, and which are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx import GraphModule

from specache_fx.capture.caches.id_runs import MovedPart, Operand, leaves_of
from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.runtime.ops import SDPA

Q, K, PAST = torch.randn(2, 4, 1, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 5, 4, 8)


def layers(*moves: Callable[[Tensor], Tensor]) -> GraphModule:
    """Attentions over caches with tokens first, each of which reads what a function makes of its own."""

    def function(*tensors: Tensor) -> list[Tensor]:
        results = []
        for i, move in enumerate(moves):
            keys = torch.cat([tensors[2 * i + 1], tensors[2 * i + 2]], 1)
            results += [F.scaled_dot_product_attention(tensors[0], move(keys), move(keys)), keys]
        return results

    return graphs.traced(function, Q, *(each.clone() for _ in moves for each in (PAST, K)))


def parts(gm: GraphModule) -> list[MovedPart]:
    outs: Any = gm.graph.output_node().args[0]
    attentions = graphs.nodes_of(gm, SDPA)
    return [
        MovedPart(gm, [Operand(side, node, 4) for side in node.args[1:3]], [out])  # type: ignore[arg-type]
        for node, out in zip(attentions, outs[1::2], strict=True)
    ]


def turned(keys: Tensor) -> Tensor:
    return keys.transpose(1, 2)


def test_a_walk_ends_at_inputs_and_at_what_computes() -> None:
    gm = graphs.traced(lambda past, k: torch.cat([past, k * 2], 1).transpose(1, 2), PAST, K)
    out = gm.graph.output_node().all_input_nodes
    past, k = placeholders(gm.graph)
    assert {leaf.name for leaf in leaves_of(out)} == {past.name, next(iter(k.users)).name}


def test_a_cast_computes() -> None:
    gm = graphs.traced(lambda past: past.half().transpose(1, 2), PAST)
    (leaf,) = leaves_of(gm.graph.output_node().all_input_nodes)
    assert leaf.op == "call_function"


def test_equal_layers_have_one_signature_and_others_another() -> None:
    signatures = [part.signature() for part in parts(layers(turned, turned, lambda k: turned(k.flip(1))))]
    assert signatures[0] == signatures[1] != signatures[2]


def test_ids_are_moved_as_the_operators_move() -> None:
    gm = layers(turned)
    (part,) = parts(gm)
    known = part.run([])
    _, past, k = placeholders(gm.graph)
    expected = torch.cat([known[past], known[k]], 1).transpose(1, 2)
    (attention,) = graphs.nodes_of(gm, SDPA)
    assert torch.equal(known[attention.args[1]], expected)  # type: ignore[index]
    assert len(expected.unique()) == expected.numel()


def test_numbers_say_how_far_a_run_has_to_reach() -> None:
    (part,) = parts(layers(lambda k: turned(k)[:, :, -3:]))
    assert part.most() == 3
