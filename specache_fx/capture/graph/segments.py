"""Dynamo's graph cut behind each attention: of equal segments one is traced.

    segment 0: embedding, ..., attention 0 | segment 1: products, feed-forward, ..., attention 1 | ... | head

A trace costs about a millisecond an operator, a copy of its result a hundredth. The layers of a model differ in their
weights, which are inputs of a segment, and in the symbols that Dynamo has for the lengths of their caches.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from specache_fx.capture.graph.graph_edit import fake_mode_of, make_module
from specache_fx.capture.graph.graph_utils import target_name, value_of

NAME = "specache_name_before"  # in the meta of a traced node: the name of the node whose result it computes
_FEWEST = 3  # segments that a cut has to give
_CROSSING = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat)  # may go from segment to segment
_LEVELS = (("_vmap_increment_nesting", 1), ("_vmap_decrement_nesting", -1))


class CannotCut(Exception):
    """A graph whose segments can't be traced apart."""


@dataclass(frozen=True)
class Segment:
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
        """The segment of some nodes, given in their order."""
        kept = tuple(nodes)
        own = set(kept)
        read = dict.fromkeys(source for node in kept for source in node.all_input_nodes if source not in own)
        return cls(kept, tuple(read), tuple(node for node in kept if not own.issuperset(node.users)))

    def graph(self, gm: GraphModule) -> GraphModule:
        """The segment alone: takes `inputs`, returns `results`. Nodes keep their names."""
        graph, copied = Graph(), dict[Node, Node]()
        for node in self.inputs:
            copied[node] = graph.placeholder(node.name)
            copied[node].meta = dict(node.meta)
        for node in self.nodes:
            copied[node] = graph.node_copy(node, lambda old: copied[old])
        graph.output(tuple(copied[node] for node in self.results))
        return make_module(gm, graph)

    def symbols(self) -> dict[Any, int]:
        """The symbols in the sizes of its inputs, numbered as they come."""
        found: dict[Any, int] = {}
        for node in self.inputs:
            for size in _numbers(value_of(node)):
                if isinstance(size, torch.SymInt):
                    for symbol in sorted(size.node.expr.free_symbols, key=str):
                        found.setdefault(symbol, len(found))
        return found

    def fingerprint(self, marked: Container[Node] = (), *, with_offsets: bool = True) -> str:
        """A text that equals another segment's where both compute the same.

        Args:
            marked: Inputs that are to differ from others.
            with_offsets: Also in where the inputs begin in their storage: a trace makes constants of that.

        Raises:
            CannotCut: If an input is neither a tensor nor a number.
        """
        numbered = {symbol: type(symbol)(f"size_{number}") for symbol, number in self.symbols().items()}
        names = {node: f"%{i}" for i, node in enumerate((*self.inputs, *self.nodes))}
        inputs = ((node in marked, value_of(node)) for node in self.inputs)
        lines = [f"{mark} {_described(value, numbered, with_offsets)}" for mark, value in inputs]
        for node in self.nodes:
            args, kwargs = (
                map_arg(side, lambda each: _Name(names[each])) for side in (node.args, node.kwargs)
            )
            lines.append(f"{node.op} {node.target} {args!r} {kwargs!r}")
        return "\n".join([*lines, *(names[node] for node in self.results)])


class _Name(str):
    __slots__ = ()
    __repr__ = str.__str__


def _numbers(value: Any, with_offsets: bool = True) -> list[Any]:
    """The sizes that make a value what it is."""
    if isinstance(value, torch.Tensor):
        return [*value.shape, *value.stride(), *([value.storage_offset()] if with_offsets else [])]
    return [value]


def _described(value: Any, numbered: dict[Any, Any], with_offsets: bool) -> str:
    if not isinstance(value, (torch.Tensor, int, float, torch.SymInt)):
        raise CannotCut
    sizes = [
        str(size.node.expr.xreplace(numbered)) if isinstance(size, torch.SymInt) else str(size)
        for size in _numbers(value, with_offsets)
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
        self._known: dict[str, tuple[Segment, GraphModule]] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                new = self._nodes[node] = self.graph.placeholder(node.name)
                new.meta = {"val": value_of(node)}
        self._output = gm.graph.output_node()

    def add(self, segment: Segment, form: str, trace: Callable[[Segment], GraphModule]) -> GraphModule:
        """Append a segment.

        Args:
            segment: The segment.
            form: Its fingerprint.
            trace: Gives its functional graph, where none of this form is known.

        Returns:
            The functional graph that it is a copy of.
        """
        if form not in self._known:
            self._known[form] = segment, trace(segment)
        like, traced = self._known[form]
        names = zip((node.name for node in like.nodes), (node.name for node in segment.nodes), strict=True)
        mine = dict(names)
        moved = {
            one: other
            for one, other in zip(like.symbols(), segment.symbols(), strict=True)
            if one is not other
        }
        mode = fake_mode_of(value_of(node) for node in segment.inputs)
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
                    new.meta["val"] = _moved(value_of(node), moved, mode)
                if (name := mine.get(new.meta.pop(NAME, ""))) is not None:
                    new._rename(name)
        self._nodes |= zip(segment.results, results, strict=True)
        return traced

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


def _moved(value: Any, symbols: dict[Any, Any], mode: Any) -> Any:
    """A fake value of one segment as that of another, which has other symbols."""

    def size(one: Any) -> Any:
        if not isinstance(one, torch.SymInt):
            return one
        return one.node.shape_env.create_symintnode(one.node.expr.xreplace(symbols), hint=None)

    def tensor(one: torch.Tensor) -> torch.Tensor:
        sizes = [each for each in (*one.shape, *one.stride()) if isinstance(each, torch.SymInt)]
        if not any(each.node.expr.free_symbols & symbols.keys() for each in sizes):
            return one
        # To know whether it is contiguous a number would be asked for, and the graph be one of that length alone.
        with mode, mode.shape_env.suppress_guards():
            shape, stride = map(size, one.shape), map(size, one.stride())
            return torch.empty_strided([*shape], [*stride], dtype=one.dtype, device=one.device)

    return pytree.tree_map(lambda one: tensor(one) if isinstance(one, torch.Tensor) else size(one), value)
