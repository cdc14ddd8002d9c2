"""What computes what in an FX graph: dependence, in-place writes included, and the parts that it tells."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from specache_fx.passes.graph_utils import reads_shape_only, shape_of, target_name, value_of
from specache_fx.passes.writes import schemas_of, storages, writes_of, written_storages

_CONSTANT_NODES = 50  # a factor is computed in fewer
_VMAP_DATA = {"_add_batch_dim", "_remove_batch_dim"}
_VMAP_LEVELS = {"_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions"}


def ancestors(nodes: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """The nodes and everything that they are computed from; of what is in `stop`, not what lies behind."""
    ends, seen = set(stop), set[Node]()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                work.extend(node.all_input_nodes)
    return seen


def needed_for(
    graph: Graph, results: Iterable[Node], inputs: Iterable[Node] = (), *, reader: Node
) -> set[Node]:
    """What computes `results` from `inputs`: their ancestors, and the in-place calls that change these on the way.

    Where these run under `torch.vmap`, the calls that begin and end its levels too: no edge leads there.

    Args:
        graph: The graph.
        results: What is wanted.
        inputs: What is given: nothing that is written into it on the way is needed.
        reader: As this node finds the results: after all in-place calls before it.
    """
    results, inputs = list(results), set(inputs)
    writes = writes_of(itertools.takewhile(lambda node: node is not reader, graph.nodes))
    given = frozenset().union(*map(storages, inputs))
    needed = ancestors(results, inputs)
    while True:
        read = frozenset().union(*(storages(node) for node in needed if _is_read(node, needed, results)))
        more = [node for node, changed in writes.items() if node not in needed and changed & read - given]
        if not more:
            return needed | _vmap_levels(graph, needed)
        needed |= ancestors(more, inputs)


def _is_read(node: Node, needed: set[Node], results: list[Node]) -> bool:
    """Whether the numbers of a needed node are, and not its shape alone."""
    return node in results or any(user in needed and not reads_shape_only(user) for user in node.users)


def borders_vmap(node: Node) -> bool:
    """Whether a node is where data enters a level of `torch.vmap`, or leaves it."""
    return target_name(node) in _VMAP_DATA


def _vmap_levels(graph: Graph, live: set[Node]) -> set[Node]:
    """The calls that begin and end the levels of `torch.vmap`, if a live node runs in one: all, in pairs."""
    if not any(map(borders_vmap, live)):
        return set()
    return {node for node in graph.nodes if target_name(node) in _VMAP_LEVELS}


def extract(gm: GraphModule, results: list[Node], inputs: list[Node], *, reader: Node) -> GraphModule:
    """A graph of its own that computes `results` from `inputs`, in the order given; these may be any nodes.

    `reader`: see `needed_for`.
    """
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in inputs:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta = dict(node.meta)
    needed = needed_for(gm.graph, results, inputs, reader=reader)
    for node in gm.graph.nodes:
        if node in needed and node not in copied:
            copied[node] = graph.node_copy(node, lambda old: copied[old])
    graph.output(tuple(copied[node] for node in results))
    return GraphModule(gm, graph)


def float_of(symbol: torch.SymFloat) -> float | None:
    """A float of the model that Dynamo made a symbol, as where two models of one class differ in it.

    A guard then says which it is, and another one compiles anew. None where it is computed from sizes, which change in
    each step, or from a tensor.
    """
    symbols = symbol.node.expr.free_symbols
    return float(symbol) if all(symbol_is_type(one, SymT.FLOAT) for one in symbols) else None


def constant_of(gm: GraphModule, value: Any, reader: Node) -> float | None:
    """The number that a constant, or a one-element tensor that is computed from constants alone, stands for.

    So does a float that Dynamo has made a symbol, see `float_of`. `reader`: see `needed_for`.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and isinstance(value_of(value), torch.SymFloat):
        return float_of(value_of(value))
    if not isinstance(value, Node) or not isinstance(value_of(value), torch.Tensor):
        return None
    needed = needed_for(gm.graph, [value], reader=reader)
    computed = all(node.op in ("call_function", "call_method") for node in needed)
    if not computed or any(not isinstance(size, int) for size in shape_of(value) or ()):
        return None
    if value_of(value).numel() != 1 or len(needed) > _CONSTANT_NODES:
        return None
    with torch.no_grad():
        return float(extract(gm, [value], [], reader=reader)()[0])


def eliminate_dead_code(graph: Graph, keep: Iterable[Node] = ()) -> int:
    """Erase what no output needs. FX's own pass erases in-place calls on live tensors; this one keeps them.

    Args:
        graph: The graph.
        keep: Nodes that are needed though nothing reads them.

    Returns:
        Number of nodes erased.
    """
    mutations: dict[Hashable, list[Node]] = {}
    work = list(keep)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or (node.op == "call_function" and is_effectful(node)):
            work.append(node)
        for memory in written_storages(node):
            mutations.setdefault(memory, []).append(node)
    live: set[Node] = set()
    while work:
        node = work.pop()
        if node not in live:
            live.add(node)
            work.extend(node.all_input_nodes)
            for memory in storages(node) if mutations else ():
                work.extend(mutations.get(memory, ()))
    live |= _vmap_levels(graph, live)
    dead = [node for node in reversed(graph.nodes) if node not in live]
    for node in dead:
        graph.erase_node(node)
    return len(dead)


def is_effectful(node: Node) -> bool:
    """Whether a call is there for what it does: ours on a session, and operators of others that return nothing."""
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        (schema, *_) = schemas_of(node.target)
        space = schema.name.split("::")[0]
        if space == "specache":
            return bool(schema.is_mutable)
        return space not in ("aten", "prims") and not schema.returns
    return False
