"""The rows of buffers that a graph writes tokens into; its caller computes them from integer inputs.

Counters are inputs that the graph moves itself. Other positions, and what the model asserts of integers, are cut out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.by_indices import Tokens, Written
from specache_fx.capture.cache_side import GROW, LEAVE, LeaveAlone
from specache_fx.capture.graph_edit import finish
from specache_fx.capture.graph_slices import ancestors, cut_out
from specache_fx.capture.graph_utils import placeholders, shape_of, value_of

REMEDY = f"Let nothing but attention read such a cache. Or {GROW}. {LEAVE}."
_aten = torch.ops.aten


def counters_of(gm: GraphModule) -> tuple[tuple[int, ...], GraphModule, tuple[int, ...]]:
    """Integer inputs that are written to, and what computes their next values from integer inputs."""
    place = _places(gm)
    moved: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        if node.target is _aten.copy_.default and _is_integer(node.args[0]):
            given = [each for each in ancestors([node.args[1]]) if each.op == "placeholder"]
            if all(map(_is_integer, given)):
                moved[node.args[0]] = node.args[1]
    graph, inputs = _cut_out(gm, list(moved.values()))
    return tuple(place[node] for node in moved), graph, inputs


def asserts_of(gm: GraphModule) -> tuple[list[Node], tuple[str, ...]]:
    """The model's assertions on its integer inputs alone, taken out of the graph: conditions and messages."""
    conditions, messages = list[Node](), list[str]()
    for node in list(gm.graph.nodes):
        if node.target in (_aten._assert_async.default, _aten._assert_async.msg):
            given = [each for each in ancestors([node]) if each.op == "placeholder"]
            if all(map(_is_integer, given)):
                conditions.append(node.args[0])
                messages.append(str((*node.args, "an assertion of the model does not hold")[1]))
                gm.graph.erase_node(node)
    return conditions, tuple(messages)


def positions_of(
    gm: GraphModule, written: Sequence[Written], further: Sequence[Any]
) -> tuple[tuple[int, ...], GraphModule, tuple[int, ...]]:
    """The rows of tokens: counters among the inputs, and a graph of other positions, then `further`."""
    place = _places(gm)
    starts, others = dict[int, None](), dict[Any, None]()
    for side in written:
        counter = _counter_of(side.position)
        if side.before in (Tokens.NONE, Tokens.FULL):
            continue
        if counter is not None:
            starts[place[counter]] = None
        else:
            others[side.position] = None
    graph, inputs = _cut_out(gm, [*others, *further])
    return tuple(starts), graph, inputs


def _cut_out(gm: GraphModule, results: list[Any]) -> tuple[GraphModule, tuple[int, ...]]:
    """A graph of its own that computes results from integers among Dynamo's inputs."""
    graph, taken = cut_out(gm, [result for result in results if isinstance(result, Node)])
    for node in placeholders(graph.graph):
        if not _is_integer(node):
            raise LeaveAlone(
                f"where a token is written is computed from `{node.name}`, which has no integers",
                f"Compute it from positions or a counter. {LEAVE}.",
            )
    found = iter(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    graph.graph.output_node().args = (
        tuple(next(found) if isinstance(result, Node) else result for result in results),
    )
    return finish(graph), taken


def _places(gm: GraphModule) -> dict[Node, int]:
    return {node: place for place, node in enumerate(placeholders(gm.graph))}


def _is_integer(node: Any) -> bool:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _counter_of(position: Any) -> Node | None:
    """The 0-d input that is added to `arange(q_len)`; None for another position."""
    if not isinstance(position, Node) or position.target is not _aten.add.Tensor or position.kwargs:
        return None
    for one, other in (position.args[:2], position.args[1::-1]):
        if _is_range(one) and isinstance(other, Node) and other.op == "placeholder" and shape_of(other) == ():
            return other
    return None


def _is_range(node: Any) -> bool:
    """Whether a node is 0, 1, 2, ..."""
    if not isinstance(node, Node):
        return False
    if node.target in (_aten.arange.start, _aten.arange.start_step):
        return bool(node.args[0] == 0 and node.args[2:] in ((), (1,)))
    return node.target is _aten.arange.default
