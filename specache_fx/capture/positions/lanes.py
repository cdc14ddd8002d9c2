"""Reasons for which a decode graph computes one token at a time, not two."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, Node

from specache_fx.capture.graph.graph_slices import ancestors, draws_random_numbers, has_effect, mutated_inputs
from specache_fx.capture.graph.graph_utils import is_static_input, placeholders, shape_of, value_of

NO_TOKENS = (
    "this graph takes no token ids (embeddings as input, several code books, or a graph break inside the model,"
    ' which TORCH_LOGS=graph_breaks names; device_map\'s hooks break it at each layer, tp_plan="auto" does not)'
)
NO_LOGITS = "this graph returns no logits over its vocabulary"


def effect_of(graph: Graph, outside: Collection[Node] = ()) -> str | None:
    """The first effect of a graph beside its results, but for calls that are taken `outside`: a reason for one lane.

    Lanes and pre-decode run what is in the graph for a token that may never come: state would move twice.
    """
    if changed := mutated_inputs(graph):
        return f"the model updates a state of its own (`{changed[0].name}`)"
    for node in graph.nodes:
        if node.op == "call_function" and node not in outside and has_effect(node):
            if draws_random_numbers(node):
                return f"the model draws random numbers (`{node.name}`), and would draw more of them"
            return f"the model calls `{node.name}` for its effect"
    return None


def single_lane(
    graph: Graph,
    kept: Sequence[Node],
    past_inputs: Sequence[int],
    token: Node | None,
    logits: int | None,
    kept_cache: str | None,
) -> str | None:
    """The reason for one token at a time in a decode graph without effects; None where it can compute two.

    Args:
        graph: The graph.
        kept: The outputs that it goes on computing.
        past_inputs: Positions of the past KV inputs.
        token: The token ids.
        logits: Position of the logits among `kept`.
        kept_cache: A cache that is left alone, and so goes on growing in the graph.
    """
    if token is None:
        return NO_TOKENS
    if kept_cache is not None:
        return (
            f"the cache of an attention that is left alone stays in the graph (`{kept_cache}`), where the speculative"
            " token would not see the output token"
        )
    if carried := _carried_state(placeholders(graph), kept, past_inputs):
        return (
            f"the model carries a state of its own from token to token (`{carried}`), which the speculative token would"
            " not find moved on"
        )
    return NO_LOGITS if logits is None else None


def _carried_state(inputs: Sequence[Node], kept: Sequence[Node], past_inputs: Sequence[int]) -> str | None:
    """An input that comes out again as another number: the state of a recurrent layer."""
    past = {inputs[i] for i in past_inputs}
    for node in inputs:
        value = value_of(node)
        if node in past or is_static_input(node) or not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point() and value.dim() > 1:
            moved = [out for out in kept if shape_of(out) == shape_of(node) and out is not node]
            if any(node in ancestors([out]) for out in moved):
                return node.name
    return None
