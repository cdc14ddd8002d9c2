"""The decode graph cut at its layers' steps: of equal parts, Inductor compiles one.

    part 0: embedding, norm, products   -> layer_step 0 -> part 1: products, norms, feed-forward -> layer_step 1 -> ...

A layer's step is an operator that Inductor fuses with nothing, so that cuts there cost no fusion. The parts between two
of them differ in their weights alone, which are inputs. Inductor's time goes with the parts that differ.

Python calls each part in each step. So a graph is left whole where its steps can't be replayed (`StepGraph`), as far as
that is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from specache_fx.capture.graph.graph_slices import writes_in_place
from specache_fx.capture.graph.graph_utils import placeholders, value_of
from specache_fx.capture.graph.segments import CannotCut, Segment, cut
from specache_fx.passes.fuse_layer_steps import is_layer_step

PartFunction = Callable[..., Any]
_GIVEN = ("placeholder", "get_attr")


class ByLayer:
    """A decode graph of compiled parts.

    Attributes:
        parts: The compiled functions, each once: what records a step looks into them (`runtime/steps/cpu_recorder.py`).
    """

    def __init__(self, gm: GraphModule, parts: Sequence[PartFunction]) -> None:
        self._run, self.parts = gm.forward, tuple(parts)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The graph's results."""
        return self._run(*inputs)


def compile_by_layer(
    gm: GraphModule,
    inputs: Sequence[torch.Tensor],
    compile_part: Callable[[GraphModule, Sequence[torch.Tensor]], PartFunction],
) -> ByLayer | None:
    """Compile a decode graph part by part.

    Args:
        gm: A traced graph of static shapes, in which one operator steps each layer.
        inputs: Real inputs.
        compile_part: Compiles a part by real inputs of it.

    Returns:
        Its callable; None where more than half of its parts are of a form of their own, or parts can't be recognised.
    """
    if any(map(writes_in_place, gm.graph.nodes)):
        return None  # a part may read what a later one writes
    held = {node: attrgetter(str(node.target))(gm) for node in gm.graph.find_nodes(op="get_attr")}
    given = held | dict(zip(placeholders(gm.graph), inputs, strict=True))
    for node, value in held.items():
        node.meta["val"] = value  # a fingerprint describes inputs by their values
    try:
        parts = split(gm.graph)
        forms = [part.fingerprint(with_offsets=False) for part in parts]
    except CannotCut:
        return None  # few layers, or an operator that takes a graph
    if 2 * len(set(forms)) > len(parts):
        return None
    compiled: dict[str, PartFunction] = {}
    for part, form in zip(parts, forms, strict=True):
        if part.results and form not in compiled:
            compiled[form] = compile_part(part.graph(gm), [_example(node, given) for node in part.inputs])
    return ByLayer(_joined(gm, parts, [compiled.get(form) for form in forms]), list(compiled.values()))


def split(graph: Graph) -> list[Segment]:
    """The parts, in order: one before each layer's step, and one after the last. What the graph holds is their input.

    Raises:
        CannotCut: If there are fewer than three.
    """
    pieces = cut(graph, is_layer_step)
    own = (
        [node for node in each.nodes if node.op != "get_attr" and not is_layer_step(node)] for each in pieces
    )
    return [*map(Segment.of, own)]


def _example(node: Node, given: dict[Node, Any]) -> Any:
    """A tensor as the node's is."""
    if node in given:
        return given[node]
    value = value_of(node)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _joined(
    gm: GraphModule, parts: Sequence[Segment], compiled: Sequence[PartFunction | None]
) -> GraphModule:
    """The graph with a call for each part."""
    graph, copied = Graph(), dict[Node, Node]()

    def copy(node: Node) -> None:
        copied[node] = graph.node_copy(node, lambda old: copied[old])

    steps = [node for node in gm.graph.nodes if is_layer_step(node)]
    for node in gm.graph.nodes:
        if node.op in _GIVEN:
            copy(node)
    for i, (part, run) in enumerate(zip(parts, compiled, strict=True)):
        if run is not None:
            results = graph.call_function(target(run), tuple(copied[node] for node in part.inputs))
            for number, node in enumerate(part.results):
                copied[node] = graph.call_function(operator.getitem, (results, number))
        if i < len(steps):
            copy(steps[i])
    graph.output(map_arg(gm.graph.output_node().args[0], lambda old: copied[old]))
    return GraphModule(gm, graph)


def target(run: PartFunction) -> PartFunction:
    """`run` as FX can call it: it writes the name of a function of torch's as that, and looks for it there."""

    def part(*inputs: torch.Tensor) -> Any:
        return run(*inputs)

    return part
