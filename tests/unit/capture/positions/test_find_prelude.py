"""What a step evaluates before its decode graph runs: lengths, and look-ups that a later token can make fail."""

from __future__ import annotations

from typing import Any

import torch
from support import graphs
from support.captured import captured
from support.zoo import build
from torch import nn

from specache_fx.capture.graph.graph_utils import target_name
from specache_fx.capture.program import Phase, Program
from specache_fx.runtime.graph.sources import PositionalPart


def prelude_of(program: Program) -> PositionalPart:
    assert program.decoding is not None
    return program.decoding.prelude


def called(prelude: PositionalPart) -> set[str]:
    nodes = (node for part in (prelude.part, prelude.later) for node in part.graph.graph.nodes)
    return {target_name(node) for node in nodes if node.op == "call_function"}


def ahead(prelude: PositionalPart, inputs: Any) -> tuple[torch.Tensor, ...]:
    results = prelude.ahead(inputs, 1)
    assert results is not None
    return results


def test_rotations_are_computed_in_the_graph() -> None:
    decode = captured("llama")[Phase.DECODE]
    prelude, inputs = prelude_of(graphs.matched(decode)), decode.inputs
    assert not {"cos", "sin", "mul", "bmm", "cat"} & called(prelude)
    (ids,) = prelude.now(inputs)
    (following,) = ahead(prelude, inputs)
    assert ids.flatten().tolist() == [10]  # the last step of the drive, after 10 tokens
    assert following.flatten().tolist() == [11]


def test_a_look_up_stays_where_it_can_fail() -> None:
    """GPT-2's table of positions ends; the token after its last row has no position, and gets the last one's."""
    model = build("gpt2", n_layer=1).requires_grad_(False)
    model.transformer.wpe = nn.Embedding(11, model.config.n_embd).requires_grad_(False)
    decode = graphs.by_phase(graphs.capture(model, graphs.drive_transformers))[Phase.DECODE]
    prelude, inputs = prelude_of(graphs.matched(decode)), decode.inputs
    assert "embedding" in called(prelude)
    (last,) = (each for each in prelude.now(inputs) if each.is_floating_point())
    (held,) = (each for each in ahead(prelude, inputs) if each.is_floating_point())
    table: torch.Tensor = model.transformer.wpe.weight
    assert torch.equal(last.reshape(-1, table.shape[1])[-1], table[10])
    assert torch.equal(held, last)
