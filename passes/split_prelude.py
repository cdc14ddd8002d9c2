"""`split_prelude`: what depends on positions and lengths alone leaves the decode graph.

    cos = f(position_ids); out = g(token, cos)   ->   prelude: cos = f(position_ids)
                                                      graph:   out = g(token, cos)

The runner evaluates the prelude for the output token and, where there are two lanes, once more for the token after
it. What is left of the graph has static shapes: it knows no length and no position.

Works on decode graphs that `bind_cache` has been through; leaves every other graph as it is.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.passes.base import Pass, PassState, Phase, leave_alone
from specache_fx.passes.graph_edit import finish
from specache_fx.passes.graph_slices import (
    draws_random_numbers,
    eliminate_dead_code,
    extract,
    mutated_inputs,
)
from specache_fx.passes.graph_utils import (
    is_integer,
    is_static_input,
    output_node,
    placeholders,
    reads_shape_only,
    shape_of,
    source_of,
    target_name,
    value_of,
)
from specache_fx.runtime.sources import Prelude, Sources

_NUMBERS = (torch.SymInt, torch.SymFloat)


def _clamp_embeddings(gm: GraphModule) -> GraphModule:
    """Hold every embedding's indices inside its table."""
    for node in list(gm.graph.nodes):
        if target_name(node) == "embedding":
            table, ids, *rest = node.args
            last = int((shape_of(table) or ())[0]) - 1
            with gm.graph.inserting_before(node):
                held = gm.graph.call_function(torch.ops.aten.clamp.default, (ids, None, last))
            node.args = (table, held, *rest)
    return finish(gm)


def _origins(graph: Graph, sources: Sources) -> tuple[set[Node], set[Node]]:
    """The nodes that a position reaches, and those that data reaches.

    Parameters are neutral: a table of position embeddings is read with positions alone. An input that is written to is
    data: it changes once a step.
    """
    moving = sources.lengths | sources.positions | sources.masks
    positional, data = set[Node](), set[Node](mutated_inputs(graph))
    for node in graph.nodes:
        if node.op == "placeholder":
            origin = node.meta["specache_input"]
            if origin not in moving and not is_static_input(node) and not is_integer(node):
                data.add(node)
            elif origin in moving and node not in data:
                positional.add(node)
            continue
        inputs = node.all_input_nodes
        length = bool(inputs) and reads_shape_only(node)
        if length and all(arg.meta.get("specache_input") in sources.shapes for arg in inputs):
            positional.add(node)
            continue
        if any(arg in positional for arg in inputs):
            positional.add(node)
        if any(arg in data for arg in inputs) or draws_random_numbers(node):
            data.add(node)
    return positional, data


def _number_in_the_graph(prelude: set[Node]) -> Node | None:
    """What computes data with a length that is a Python number."""
    for node in prelude:
        if shape_of(node) is None and isinstance(value_of(node), _NUMBERS):
            for user in node.users:
                if user not in prelude and user.op != "output":
                    return user
    return None


def split_prelude(gm: GraphModule, state: PassState) -> GraphModule:
    """Cut the graph where position-only tensors enter the rest; sets `state.prelude`."""
    if state.phase is not Phase.DECODE or state.sources is None or state.prelude is not None:
        return gm
    graph, sources = gm.graph, state.sources
    inputs = placeholders(graph)
    origin = {node: node.meta["specache_input"] for node in inputs}

    positional, data = _origins(graph, sources)
    prelude = {node for node in graph.nodes if node.op != "output" and node in positional - data}
    # A cache that stays in the graph has a length of its own in each step anyhow.
    if state.kept_cache is None and (number := _number_in_the_graph(prelude)) is not None:
        leave_alone(
            state,
            f"`{number.name}` ({source_of(number)}) computes with the number of tokens as a Python number, so that"
            " every length would be a graph of its own",
            "Make it a tensor, of position_ids or a mask.",
        )
        return gm
    boundary = [
        node
        for node in graph.nodes
        if node in prelude and shape_of(node) is not None and any(user not in prelude for user in node.users)
    ]
    if boundary:
        needed = [
            node
            for node in inputs
            if node in prelude or is_static_input(node) or is_integer(node) or origin[node] in sources.shapes
        ]
        plain = _without_unread_inputs(extract(gm, boundary, needed))
        results = list(output_node(plain.graph).all_input_nodes)
        names = {node.name for node in placeholders(plain.graph)}
        state.prelude = Prelude(
            graph=plain,
            graph_ahead=_clamp_embeddings(extract(plain, results, placeholders(plain.graph))),
            inputs=tuple(origin[node] for node in needed if node.name in names),
            sources=sources,
        )
    for i, node in enumerate(boundary):
        with graph.inserting_after(inputs[-1]):
            entry = graph.placeholder(f"specache_prelude_{i}")
        entry.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        entry.meta["specache_prelude"] = i
        for user in list(node.users):
            if user not in prelude:
                user.replace_input_with(node, entry)
        inputs.append(entry)
    for node in reversed(graph.nodes):  # calls without a result that are made with positions alone
        if node in prelude and not node.users and node.op != "placeholder":
            graph.erase_node(node)
    eliminate_dead_code(graph)
    for node in placeholders(graph):
        if not node.users:
            graph.erase_node(node)
    return finish(gm)


def _without_unread_inputs(gm: GraphModule) -> GraphModule:
    """Erase the inputs that nothing reads."""
    for node in placeholders(gm.graph):
        if not node.users:
            gm.graph.erase_node(node)
    return finish(gm)


SPLIT_PRELUDE = Pass("split_prelude", split_prelude)
