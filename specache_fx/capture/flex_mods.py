"""`score_mod` and `mask_mod` of a flex attention, computed for all places of its scores at once.

Their graphs are of one place, `b`, `h`, `i`, `j` without dimensions. Here these are indices that broadcast, from
`[batch, 1, 1, 1]` to `[1, 1, 1, kv_len]`. So what reads them has to be pointwise, or to take one number of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_slices import draws_random_numbers
from specache_fx.capture.graph_utils import described, is_pointwise, reads_shape_only, shape_of, value_of
from specache_fx.capture.score_chain import Rows

_aten = torch.ops.aten


class UnclearError(Exception):
    """A flex attention can't be told plainly; the message says why."""


class Mods:
    """Computes the mods of one attention before it.

    Args:
        gm: The graph.
        flex: The attention.
        rows: Calls that others have made already.
    """

    def __init__(self, gm: GraphModule, flex: Node, rows: Rows) -> None:
        self._gm, self._flex, self._rows = gm, flex, rows
        given: Any = flex.args
        query, key, *_ = given
        sizes = [rows.size(flex, side, dim) for side, dim in ((query, 0), (query, 1), (query, 2), (key, 2))]
        device = value_of(query).device
        self._places = []
        for dim, size in enumerate(sizes):
            index = self.call(_aten.arange.default, size, dtype=torch.int64, device=device)
            shape = [-1 if each == dim else 1 for each in range(4)]
            self._places.append(self.call(_aten.reshape.default, index, shape))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The result of a call before the attention."""
        return self._rows.call(self._flex, target, *args, **kwargs)

    def run(self, mod: Any, reads: Sequence[Any], scores: Sequence[Node] = ()) -> Node:
        """The result of a mod.

        Args:
            mod: Its graph.
            reads: What it captures.
            scores: Its first argument, where it has that.

        Raises:
            UnclearError: If an operator in it is of one place alone.
        """
        varied = {*scores, *self._places}
        arguments = iter([*scores, *self._places, *reads])
        values: dict[Node, Any] = {}
        graph = getattr(self._gm, mod.target).graph
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "call_function":
                read = (values[each] for each in node.all_input_nodes)
                varies = not reads_shape_only(node) and not varied.isdisjoint(read)
                if draws_random_numbers(node) or (varies and not _is_one_by_one(node)):
                    raise UnclearError(f"{described(node)} is neither pointwise nor one number of a tensor")
                args = torch.fx.node.map_arg(node.args, values.__getitem__)
                values[node] = self.call(node.target, *args, **node.kwargs)
                if varies:
                    varied.add(values[node])
            elif node.op != "output":
                raise UnclearError(f"`{node.name}` is a constant of its own")
        (result,) = graph.output_node().args
        if result not in values:
            raise UnclearError("its mod returns no tensor")
        return values[result]


def _is_one_by_one(node: Node) -> bool:
    """Whether an operator gives the same for each place, however many there are."""
    target: Any = node.target
    if shape_of(node) != ():
        return False
    if target is not _aten.index.Tensor:
        return is_pointwise(node)
    args: Any = node.args
    source, indices = args
    return len(shape_of(source) or ()) == len(indices) and all(shape_of(index) == () for index in indices)
