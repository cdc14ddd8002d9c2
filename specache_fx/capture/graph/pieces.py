"""`Piece`: consecutive nodes of a graph, as a graph of their own, and whether two compute the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from specache_fx.capture.graph.graph_edit import make_module


@dataclass(frozen=True)
class Piece:
    """Nodes of a graph, in their order there.

    Attributes:
        nodes: In their order.
        inputs: Nodes of others that they read, in the order in which they do.
        results: Those of the nodes that others read.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Self:
        """The piece of some nodes, given in their order."""
        kept = tuple(nodes)
        own = set(kept)
        read = dict.fromkeys(source for node in kept for source in node.all_input_nodes if source not in own)
        return cls(kept, tuple(read), tuple(node for node in kept if not own.issuperset(node.users)))

    def graph(self, gm: GraphModule) -> GraphModule:
        """The piece alone: takes `inputs`, returns `results`. Nodes keep their names."""
        graph, copied = Graph(), dict[Node, Node]()
        for node in self.inputs:
            copied[node] = graph.placeholder(node.name)
            copied[node].meta = dict(node.meta)
        for node in self.nodes:
            copied[node] = graph.node_copy(node, lambda old: copied[old])
        graph.output(tuple(copied[node] for node in self.results))
        return make_module(gm, graph)

    def fingerprint(self, signatures: Iterable[str]) -> str:
        """A text that equals another piece's where both compute the same.

        Args:
            signatures: Of each input a line that describes it.
        """
        names = {node: f"%{i}" for i, node in enumerate((*self.inputs, *self.nodes))}
        lines = list(signatures)
        for node in self.nodes:
            args, kwargs = (
                map_arg(side, lambda each: _Name(names[each])) for side in (node.args, node.kwargs)
            )
            lines.append(f"{node.op} {node.target} {args!r} {kwargs!r}")
        return "\n".join([*lines, *(names[node] for node in self.results)])


class _Name(str):
    __slots__ = ()
    __repr__ = str.__str__
