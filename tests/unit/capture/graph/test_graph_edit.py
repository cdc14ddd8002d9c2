"""Edits: new calls know their value and their line, sizes come from the graph's integers, inputs are added behind."""

from __future__ import annotations

from typing import Any

import torch
from support import graphs
from support.captured import captured
from torch.fx import GraphModule

from specache_fx.capture.graph.graph_edit import add_placeholder, call, fake_mode_of, place_behind, size_of
from specache_fx.capture.graph.graph_utils import placeholders, shape_of, value_of
from specache_fx.capture.program import Phase

aten = torch.ops.aten


def traced(phase: Phase = Phase.DECODE) -> tuple[GraphModule, list[Any]]:
    """A graph with open sizes, and its real inputs."""
    taken = captured("tiny")[phase]
    return taken.copy(), list(taken.inputs)


def test_a_call_has_its_value_and_the_line_that_it_stands_for() -> None:
    gm, _ = traced()
    (attention, *_) = graphs.nodes_of(gm, torch.ops.specache.scaled_dot_product_attention.default)
    with gm.graph.inserting_before(attention):
        made = call(gm.graph, aten.mul.Tensor, (attention.args[0], 2.0), attention, "twice")
    assert made.name == "twice" and shape_of(made) == shape_of(attention.args[0])
    assert made.meta["stack_trace"] == attention.meta["stack_trace"]
    assert fake_mode_of([value_of(made)]) is fake_mode_of([value_of(attention)])


def test_an_open_size_is_computed_from_an_input_that_is_an_integer() -> None:
    """Not from the tensor: a pass may take that out of the graph."""
    gm, inputs = traced()
    attention = graphs.nodes_of(gm, torch.ops.specache.scaled_dot_product_attention.default)[-1]
    query, keys = attention.args[:2]
    assert size_of(attention, query, 2) == 1  # known
    kv_len = size_of(attention, keys, 2)
    assert isinstance(shape_of(keys)[2], torch.SymInt)  # type: ignore[index]
    assert keys not in kv_len.all_input_nodes
    gm.graph.output_node().args = ((kv_len,),)
    gm.recompile()
    (found,) = gm(*inputs)
    past = max(value.shape[2] for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 4)
    assert found == past + 1


def test_an_input_is_added_behind_the_others_in_their_fake_mode() -> None:
    gm, _ = traced()
    before = placeholders(gm.graph)
    made = add_placeholder(gm.graph, "table", torch.ones(2, 3))
    assert placeholders(gm.graph) == [*before, made]
    assert fake_mode_of([value_of(made)]) is fake_mode_of(map(value_of, before))
    assert value_of(add_placeholder(gm.graph, "count", 3)) == 3


def test_the_place_behind_nodes_is_behind_all_inputs() -> None:
    gm, _ = traced()
    inputs = placeholders(gm.graph)
    assert place_behind([inputs[0], 5]) is inputs[-1].next
    nodes = list(gm.graph.nodes)
    assert place_behind([nodes[-3], inputs[0], nodes[-4]]) is nodes[-2]
