"""Edits of an FX graph: copies, calls, inputs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from specache_fx.capture.graph.fake_results import results_of
from specache_fx.capture.graph.graph_utils import placeholders, value_of
from specache_fx.capture.graph.left_alone import UnknownFormError


def make_module(root: Any, graph: Graph) -> GraphModule:
    """A module whose code is made when it first runs: most graphs are edited again before that."""
    return _LazyGraphModule(root, graph)


def copy_graph(gm: GraphModule, copied: dict[Node, Node] | None = None) -> GraphModule:
    """A copy that may be edited: Dynamo goes on using its own graph. `copied` gets the copies of nodes."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {} if copied is None else copied))
    return make_module(gm, graph)


def add_placeholder(graph: Graph, name: str, value: Any) -> Node:
    """A new last input, with a fake value in the fake mode of the others."""
    others = placeholders(graph)
    with graph.inserting_after(others[-1]):
        node = graph.placeholder(name)
    mode = fake_mode_of(value_of(other) for other in others)
    node.meta["val"] = (
        mode.from_tensor(value) if mode is not None and isinstance(value, torch.Tensor) else value
    )
    return node


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    """The fake mode of the values. Not the ambient one: Dynamo changes it before it calls a backend."""
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, FakeTensor):
                return item.fake_mode
    return None


def call(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    origin: Node,
    name: str | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Node:
    """Insert a call at the graph's insertion point, with its fake value and where it comes from.

    Args:
        graph: The graph, within `inserting_before` or `inserting_after`.
        target: A function or operator.
        args: Nodes and constants.
        origin: The node that this call stands for: its source line is kept.
        name: What to call its result; FX makes it unique.
        kwargs: Constants.
    """
    kwargs = kwargs or {}
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    node.meta = origin_of(origin)
    mode = fake_mode_of(map(value_of, (*node.all_input_nodes, origin)))
    if mode is not None:
        given = map_arg(args, value_of)
        node.meta["val"] = results_of(mode).call(target, given, kwargs, context=lambda: _within(mode))
    return node


@contextlib.contextmanager
def _within(mode: FakeTensorMode) -> Iterator[None]:
    with enable_python_dispatcher(), mode, torch.no_grad():  # some operators take no symbols else
        yield


def size_of(before: Node, node: Node, dim: int) -> Any:
    """Size of one dimension of `node`: a number, or nodes that compute it, inserted before `before`.

    It is computed from the graph's integer inputs where possible, so it does not depend on `node`.
    """
    size, graph = value_of(node).shape[dim], before.graph
    if isinstance(size, int):
        return size
    integers = [each for each in placeholders(graph) if isinstance(value_of(each), torch.SymInt)]
    symbols = {value_of(each).node.expr: each for each in integers}
    terms = size.node.expr.as_ordered_terms()
    with graph.inserting_before(before):
        if not all(term.is_Integer or term in symbols for term in terms):
            return call(graph, torch.ops.aten.sym_size.int, (node, dim), before)
        total, *others = (int(term) if term.is_Integer else symbols[term] for term in terms)
        for other in others:
            total = call(graph, operator.add, (total, other), before)
        return total


class CallsOnce:
    """Inserts calls, the same one on the same nodes once: layers share their masks."""

    def __init__(self) -> None:
        self._known: dict[Any, Node] = {}

    def call(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The result of a call; a new one is inserted before a node.

        Raises:
            UnknownFormError: If the shapes don't fit: they were guessed.
        """
        key = (target, repr((args, kwargs)))
        if key not in self._known:
            last = before.prev
            try:
                with before.graph.inserting_before(before):
                    self._known[key] = call(before.graph, target, args, before, kwargs=kwargs)
            except Exception as error:  # of any operator, one of whose operands is a zero now
                if before.prev is not last:
                    before.graph.erase_node(before.prev)
                raise UnknownFormError(before, "is of parts whose shapes don't fit each other") from error
        return self._known[key]

    def size(self, before: Node, node: Node, dim: int) -> Any:
        """A size, see `size_of`; the same one once."""
        key = ("size", str(value_of(node).shape[dim]))
        if key not in self._known:
            self._known[key] = size_of(before, node, dim)
        return self._known[key]


def place_behind(nodes: Iterable[Any]) -> Node:
    """The first node behind nodes, and behind all inputs; what else is given is left out."""
    wanted = {node for node in nodes if isinstance(node, Node)}
    last = next(node for node in reversed(next(iter(wanted)).graph.nodes) if node in wanted)
    while last.next.op == "placeholder":
        last = last.next
    return last.next


def origin_of(node: Node) -> dict[str, Any]:
    """The notes that say which line of the model a node comes from."""
    kept = ("stack_trace", "nn_module_stack", "source_fn_stack")
    return {key: value for key, value in node.meta.items() if key in kept}


def finish(gm: GraphModule) -> GraphModule:
    """Check an edited graph, and have its code made again."""
    gm.graph.lint()
    gm.recompile()
    return gm
