"""When a graph writes into a tensor: between which of its readers."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.passes.graph_utils import value_of
from specache_fx.passes.writes import storages, writes_of, written_by


class WriteLog:
    """The in-place operations of a graph, as it is now.

    Args:
        graph: The graph. Nodes that are inserted later have no place in the log.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._changed = writes_of(graph.nodes)

    def between(self, result: Node, first: Node | None, last: Node) -> list[Node]:
        """What may write to the memory of a result from one node on (None: from the start) until before another."""
        if not self._changed:
            return []
        start, stop, memory = 0 if first is None else self._order[first], self._order[last], storages(result)
        return [
            node
            for node, changed in self._changed.items()
            if start <= self._order[node] < stop
            and changed & memory
            and any(_may_overlap(value_of(into), value_of(result)) for into in written_by(node))
        ]


def _may_overlap(one: Any, other: Any) -> bool:
    """Whether two views of one storage may share elements: not where they are other columns of the same rows."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
        return True
    widths = {
        stride for side in (one, other) for stride in side.stride() if isinstance(stride, int) and stride > 1
    }
    for width in widths:
        columns = [_columns(side, width) for side in (one, other)]
        if None not in columns and (columns[0][1] <= columns[1][0] or columns[1][1] <= columns[0][0]):  # type: ignore[index]
            return False
    return True


def _columns(tensor: torch.Tensor, width: int) -> tuple[int, int] | None:
    """The columns that a tensor has of a matrix with rows of that width; None where it is no part of one."""
    start: Any = tensor.storage_offset()
    if not isinstance(start, int):
        return None
    start, span = start % width, 1
    dims: list[tuple[Any, Any]] = list(zip(tensor.shape, tensor.stride(), strict=True))
    for size, stride in dims:
        if statically_known_true(stride % width == 0):
            continue
        if not isinstance(size, int) or not isinstance(stride, int):
            return None
        span += (size - 1) * stride
    return (start, start + span) if start + span <= width else None
