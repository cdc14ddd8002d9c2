"""Dynamo's graph cut behind each attention: of equal segments one is traced.

    segment 0: embedding, ..., attention 0 | segment 1: products, feed-forward, ..., attention 1 | ... | head

A trace costs about a millisecond an operator, a copy of its result a hundredth. The layers of a model differ in their
weights, which are inputs of a segment, and in the symbols that Dynamo has for the lengths of their caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from specache_fx.capture.graph.graph_edit import fake_mode_of, make_module
from specache_fx.capture.graph.graph_utils import target_name, value_of
from specache_fx.capture.graph.pieces import Piece

_FEWEST = 3  # segments that a cut has to give
_CROSSING = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat)  # may go from segment to segment
_LEVELS = (("_vmap_increment_nesting", 1), ("_vmap_decrement_nesting", -1))


class CannotCut(Exception):
    """A graph whose segments can't be traced apart."""


class Segment(Piece):
    """Nodes of a graph, one behind the other."""

    def symbols(self) -> dict[Any, int]:
        """The symbols in the sizes of its inputs, numbered as they come."""
        found: dict[Any, int] = {}
        for node in self.inputs:
            for size in _numbers(value_of(node)):
                if isinstance(size, torch.SymInt):
                    for symbol in sorted(size.node.expr.free_symbols, key=str):
                        found.setdefault(symbol, len(found))
        return found

    def input_signatures(self) -> list[str]:
        """Of each input a line that describes it, see `fingerprint`."""
        numbered = {symbol: type(symbol)(f"size_{number}") for symbol, number in self.symbols().items()}
        return [_described(value_of(node), numbered) for node in self.inputs]


def _numbers(value: Any) -> list[Any]:
    """The sizes that make a value what it is."""
    if isinstance(value, torch.Tensor):
        return [*value.shape, *value.stride(), value.storage_offset()]
    return [value]


def _described(value: Any, numbered: dict[Any, Any]) -> str:
    if not isinstance(value, (torch.Tensor, int, float, torch.SymInt)):
        raise CannotCut
    sizes = [
        str(size.node.expr.xreplace(numbered)) if isinstance(size, torch.SymInt) else str(size)
        for size in _numbers(value)
    ]
    kind = f"{value.dtype} {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
    return f"{kind} {sizes}"


def cut(graph: Graph, ends: Callable[[Node], bool]) -> list[Segment]:
    """The segments of a graph, in order: each but the last has a node that ends it.

    Raises:
        CannotCut: If there are fewer than three, or something other than tensors and numbers goes from one to another.
    """
    pieces: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        pieces[-1].append(node)
        if ends(node):
            pieces.append([])
    found = [Segment.of(nodes) for nodes in pieces if nodes]
    crossing = (value_of(node) for segment in found for node in segment.inputs)
    if (
        len(found) < _FEWEST
        or any(not _is_level(segment.nodes) for segment in found)
        or any(not isinstance(value, _CROSSING) for value in crossing)
    ):
        raise CannotCut
    return found


def _is_level(nodes: Iterable[Node]) -> bool:
    """Whether levels of vmap that begin here end here."""
    return not sum(step for node in nodes for name, step in _LEVELS if target_name(node) == name)


class Joined:
    """A graph put together from traced segments.

    Args:
        gm: The graph that was cut: its placeholders come first.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.root, self.graph = torch.nn.Module(), Graph()
        self._nodes: dict[Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                new = self._nodes[node] = self.graph.placeholder(node.name)
                new.meta = {"val": value_of(node)}
        self._output = gm.graph.output_node()

    def add(self, segment: Segment, like: Segment, traced: GraphModule, names: dict[Node, str]) -> None:
        """Append a segment.

        Args:
            segment: The segment.
            like: One of the same form.
            traced: That one's functional graph.
            names: Of the nodes in it, by what they are in `like`.
        """
        mine = dict(
            zip((node.name for node in like.nodes), (node.name for node in segment.nodes), strict=True)
        )
        moved = {
            one: other
            for one, other in zip(like.symbols(), segment.symbols(), strict=True)
            if one is not other
        }
        values = _Moved(moved, fake_mode_of(value_of(node) for node in segment.inputs))
        copied: dict[Node, Any] = {}
        given = iter(segment.inputs)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                copied[node] = self._nodes[next(given)]
            elif node.op == "get_attr":
                copied[node] = self._constant(traced, node)
            elif node.op == "output":
                results: Any = map_arg(node.args[0], lambda old: copied[old])
            else:
                new = copied[node] = self.graph.node_copy(node, lambda old: copied[old])
                if moved:
                    new.meta["val"] = values.of(value_of(node))
                if (name := mine.get(names.get(node, ""))) is not None:
                    new._rename(name)
        self._nodes |= zip(segment.results, results, strict=True)

    def _constant(self, traced: GraphModule, node: Node) -> Node:
        value = getattr(traced, str(node.target))
        name = f"constant_{len(self.graph.nodes)}"
        setattr(self.root, name, value)
        new = self.graph.get_attr(name)
        new.meta = dict(node.meta)
        return new

    def finish(self) -> GraphModule:
        """The whole graph."""
        self.graph.output(map_arg(self._output.args[0], lambda old: self._nodes[old]))
        return make_module(self.root, self.graph)


class _Moved:
    """Fake values of one segment as those of another, which has other symbols."""

    def __init__(self, symbols: dict[Any, Any], mode: Any) -> None:
        self._symbols, self._mode = symbols, mode

    def of(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(each) for each in value)
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if not isinstance(value, torch.Tensor) or not self._touches(value):
            return value
        # To know whether it is contiguous a number would be asked for, and the graph be one of that length alone.
        with self._mode, self._mode.shape_env.suppress_guards():
            return torch.empty_strided(
                [self._size(size) for size in value.shape],
                [self._size(stride) for stride in value.stride()],
                dtype=value.dtype,
                device=value.device,
            )

    def _touches(self, value: torch.Tensor) -> bool:
        sizes = (size for size in (*value.shape, *value.stride()) if isinstance(size, torch.SymInt))
        return any(size.node.expr.free_symbols & self._symbols.keys() for size in sizes)

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr.xreplace(self._symbols)
        return size.node.shape_env.create_symintnode(expression, hint=None)
