"""Dependence in a functional graph, and parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from specache_fx.capture.graph.graph_utils import placeholders, reads_shape_only, target_name, value_of
from specache_fx.capture.graph.segments import Segment
from specache_fx.runtime.graph.graph_part import Part
from specache_fx.runtime.ops import SDPA

_CONSTANT_NODES = 50  # a factor is computed in fewer


def ancestors(nodes: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """The nodes and everything that they are computed from; nothing behind the nodes in `stop`."""
    ends, seen = set(stop), set[Node]()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                work.extend(node.all_input_nodes)
    return seen


def between(starts: Iterable[Node], ends: Iterable[Node], stop: Iterable[Node] = ()) -> list[Node]:
    """Some nodes of a graph, and in order what is computed from their numbers on the way to others, these included.

    Nothing behind the nodes in `stop` counts.
    """
    found, needed = dict.fromkeys(starts), ancestors(ends, stop)
    for node in next(iter(found)).graph.nodes if found else ():
        if (
            node in needed
            and not found.keys().isdisjoint(node.all_input_nodes)
            and not reads_shape_only(node)
        ):
            found[node] = None
    return list(found)


def extract(
    gm: GraphModule, results: list[Node], inputs: list[Node], effects: Sequence[Node] = ()
) -> GraphModule:
    """A graph of its own that computes `results` from `inputs`, in the order given; these may be any nodes.

    It also makes the calls `effects`, which have no result.
    """
    needed = ancestors([*results, *effects], inputs).difference(inputs)
    nodes = tuple(node for node in gm.graph.nodes if node in needed)
    return Segment(nodes, tuple(inputs), tuple(results)).graph(gm)


def cut_out(gm: GraphModule, results: list[Node], effects: Sequence[Node] = ()) -> Part:
    """What computes `results` from Dynamo's inputs; see `extract`."""
    needed = ancestors([*results, *effects])
    inputs = {i: node for i, node in enumerate(placeholders(gm.graph)) if node in needed}
    return Part(extract(gm, results, list(inputs.values()), effects), tuple(inputs))


def float_of(symbol: torch.SymFloat) -> float | None:
    """A float of the model that Dynamo made a symbol, as where two models of one class differ in it.

    A guard then says which it is, and another one compiles anew. None where it is computed from sizes, which change in
    each step, or from a tensor.
    """
    symbols = symbol.node.expr.free_symbols
    return float(symbol) if all(symbol_is_type(one, SymT.FLOAT) for one in symbols) else None


def constant_of(gm: GraphModule, value: Any) -> float | None:
    """The number that a constant, or a one-element tensor that is computed from constants alone, stands for.

    So does a float that Dynamo has made a symbol, see `float_of`.
    """
    fake = value_of(value)
    if isinstance(fake, torch.SymFloat):
        return float_of(fake)
    if not isinstance(value, Node):
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    # A size that is a symbol is none: to compare it would add a guard.
    if not isinstance(fake, torch.Tensor) or any(type(size) is not int or size != 1 for size in fake.shape):
        return None
    needed = ancestors([value])
    if len(needed) > _CONSTANT_NODES or any(node.op == "placeholder" for node in needed):
        return None
    with torch.no_grad():
        return float(extract(gm, [value], [])()[0])


def is_assert(node: Node) -> bool:
    """Whether a node does nothing but compare what it gets. It may do so twice, as pre-decode does."""
    return target_name(node).startswith(("_assert", "sym_constrain"))


def has_effect(node: Node) -> bool:
    """Whether a node is there for what it does: it writes to an input, returns nothing, or draws random numbers."""
    if node.op in ("placeholder", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_module"
    return bool(schema.is_mutable or not schema.returns or draws_random_numbers(node))


def writes_in_place(node: Node) -> bool:
    """Whether a call changes a tensor of the model in place. Our own operators don't: they change only `state`."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable) and not schema.name.startswith("specache::")


def draws_random_numbers(node: Node) -> bool:
    """Whether a node's result is another one each time."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    attends = node.target is SDPA
    return attends and bool(node.args[4])  # dropout


def eliminate_dead_code(graph: Graph) -> None:
    """Erase what no output needs and what has no effect. Torch's own checks the graph each time, and its subgraphs."""
    for node in reversed(graph.nodes):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def mutated_inputs(graph: Graph) -> list[Node]:
    """The inputs that the graph writes to: a recurrent state, a counter."""
    written = (node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default)
    return [node for node in dict.fromkeys(written) if isinstance(node, Node) and node.op == "placeholder"]
