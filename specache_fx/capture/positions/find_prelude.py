"""The nodes by which positions and lengths enter a decode graph: position ids, position embeddings, ALiBi's distances.

    ids = arange(kv_len, kv_len + 1); cos = f(ids); out = g(token, cos)   ->   prelude: ids = arange(...)

The runner evaluates the prelude for the output token and, where there are two lanes, once more for the token after it.
It is as small as can be: a graph launches faster than Python. It holds all that computes with a length, and all that
a later token can make fail. The rest of the graph has static shapes, and takes positions as data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.graph.graph_edit import finish
from specache_fx.capture.graph.graph_slices import (
    ancestors,
    cut_out,
    draws_random_numbers,
    has_effect,
    is_assert,
    mutated_inputs,
)
from specache_fx.capture.graph.graph_utils import (
    described,
    is_integer,
    is_static_input,
    placeholders,
    reads_shape_only,
    shape_of,
    source_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import LEAVE, LeaveAlone
from specache_fx.capture.program import AttentionSite
from specache_fx.runtime.graph.sources import PositionalPart, Sources

_LOOKS_UP = ("embedding", "index", "index_select", "gather", "take")


def find_prelude(
    gm: GraphModule,
    sites: Sequence[AttentionSite],
    kept: Sequence[Node],
    sources: Sources,
    *,
    lengths_are_static: bool,
) -> tuple[PositionalPart, tuple[Node, ...], tuple[Node, ...]]:
    """The nodes by which position-only tensors enter the rest of a decode graph.

    Args:
        gm: The graph, its caches still in it.
        sites: Its attentions: all that they will read are queries, new keys and values, and sinks.
        kept: The outputs that it goes on computing.
        sources: What is known of its inputs.
        lengths_are_static: Refuse a graph that computes data with a length that is a Python number.

    Returns:
        `Decoding.prelude`, `.boundary` and `.asserts`.

    Raises:
        LeaveAlone: If every length would be a graph of its own.
    """
    reads = _reads(gm.graph, sites, kept)
    positional, data = _origins(gm.graph, sources)
    inside = positional - data
    rest = [node for node in gm.graph.nodes if node in reads and node not in inside]
    number = next(
        (node for node in rest if any(each in inside and _is_number(each) for each in reads[node])), None
    )
    if lengths_are_static and number is not None:
        raise LeaveAlone(
            f"`{number.name}` ({source_of(number)}) computes with the number of tokens as a Python number, so that"
            " every length would be a graph of its own",
            "Make it a tensor, of position_ids or a mask.",
        )
    _check_items(data)
    outside = ancestors(node for node in inside if _runs_outside(node)) & inside
    entering = {each for node in reads.keys() - outside for each in reads[node]}.union(kept) & outside
    boundary = [node for node in gm.graph.nodes if node in entering and shape_of(node) is not None]
    asserts = [node for node in gm.graph.nodes if node not in data and is_assert(node)]
    later = cut_out(gm, boundary)
    _clamp_embeddings(later.graph)
    prelude = PositionalPart(cut_out(gm, boundary, asserts), later, sources)
    return prelude, tuple(boundary), tuple(asserts)


def _check_items(data: set[Node]) -> None:
    """Raise where a number of the model's data would be a constant of the graph."""
    for item in (node for node in data if target_name(node) == "_local_scalar_dense"):
        what, each = "makes a Python number of the model's data", "number"
        remedy = "Keep it a tensor."
        grapharg = item.all_input_nodes[0].meta.get("grapharg")
        if getattr(grapharg, "pass_arg_as_tensor", False):  # so Dynamo passes floats
            what, each = "computes with a float among the arguments of the compiled code", "float"
            remedy = "Keep it as an attribute of the module, or compile without dynamic=True."
        reason = f"{described(item)} {what}, so that every {each} would be a graph of its own"
        raise LeaveAlone(reason, f"{remedy} {LEAVE}.")


def _runs_outside(node: Node) -> bool:
    """Whether a graph of one shape can't compute a node, or fails to where a token has no position in the model."""
    sizes = [shape_of(each) for each in (node, *node.all_input_nodes)]
    if node.op == "placeholder" or is_assert(node) or target_name(node) in _LOOKS_UP:
        return True
    return any(size is None or not all(isinstance(n, int) for n in size) for size in sizes)


def _is_number(node: Node) -> bool:
    return shape_of(node) is None and isinstance(value_of(node), (torch.SymInt, torch.SymFloat))


def _reads(graph: Graph, sites: Sequence[AttentionSite], kept: Sequence[Node]) -> dict[Node, Sequence[Node]]:
    """The nodes that are needed once the cache is out of the graph, and what each reads then."""
    of_sites = {
        site.core.node: [
            each
            for each in (site.core.query, site.keys.new, site.values.new, site.core.sinks)
            if each is not None
        ]
        for site in sites
    }
    reads: dict[Node, Sequence[Node]] = {}
    work = [*kept, *(node for node in graph.nodes if node.op == "call_function" and has_effect(node))]
    while work:
        node = work.pop()
        if node not in reads:
            reads[node] = of_sites.get(node, node.all_input_nodes)
            work.extend(reads[node])
    return reads


def _origins(graph: Graph, sources: Sources) -> tuple[set[Node], set[Node]]:
    """The nodes that a position reaches, and those that data reaches.

    Parameters are neutral: a table of position embeddings is read with positions alone. An input that is written to is
    data: it changes once a step.
    """
    index = {node: i for i, node in enumerate(placeholders(graph))}
    moving = sources.counts | sources.masks
    positional, data = set[Node](), set[Node](mutated_inputs(graph))
    for node in graph.nodes:
        if node.op == "placeholder":
            if index[node] not in moving and not is_static_input(node) and not is_integer(node):
                data.add(node)
            elif index[node] in moving and node not in data:
                positional.add(node)
            continue
        inputs = node.all_input_nodes
        length = bool(inputs) and reads_shape_only(node)
        if length and all(index.get(arg) in sources.caches for arg in inputs):
            positional.add(node)
            continue
        if any(arg in positional for arg in inputs):
            positional.add(node)
        if any(arg in data for arg in inputs) or draws_random_numbers(node):
            data.add(node)
    return positional, data


def _clamp_embeddings(gm: GraphModule) -> None:
    """Hold every embedding's indices inside its table."""
    for node in list(gm.graph.nodes):
        if target_name(node) == "embedding":
            table, ids, *rest = node.args
            last = int((shape_of(table) or ())[0]) - 1
            with gm.graph.inserting_before(node):
                held = gm.graph.call_function(torch.ops.aten.clamp.default, (ids, None, last))
            node.args = (table, held, *rest)
    finish(gm)
