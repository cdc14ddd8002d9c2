"""Nodes that compute the same: a model that views the same cos and sin in each of its layers means one view."""

from __future__ import annotations

from collections.abc import Hashable, Set

from torch.fx import Graph, Node

from specache_fx.passes.graph_slices import borders_vmap
from specache_fx.passes.graph_utils import output_node, shape_of
from specache_fx.passes.writes import storages, writes_of


def merge_equal_nodes(graph: Graph, among: Set[Node]) -> set[Node]:
    """Let the first of several equal calls stand for all, and erase the others.

    Nothing is done where one of them is written into in place (memory of its own may be meant), or runs under
    `torch.vmap` (the same call is another one at another level). What the graph returns keeps its memory to itself.

    Args:
        graph: The graph.
        among: Which of its nodes; none is random or under autocast, and none outside writes into their memory.

    Returns:
        What was erased.
    """
    if writes_of(node for node in graph.nodes if node in among) or any(map(borders_vmap, among)):
        return set()
    returned = frozenset().union(*map(storages, output_node(graph).all_input_nodes))
    first: dict[Hashable, Node] = {}
    merged = set[Node]()
    for node in list(graph.nodes):
        if (
            node not in among
            or node.op == "placeholder"
            or shape_of(node) is None
            or storages(node) & returned
        ):
            continue
        # Of nodes a name, and of numbers the type: 1 == 1.0 == True, but these are different calls.
        same = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            merged.add(node)
    return merged
