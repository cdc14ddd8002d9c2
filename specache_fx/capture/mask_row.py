"""The newest query's mask of an attention, put together from the masks and biases that are added one by one.

    s = baddbmm(alibi, q, k^T); s = s.view(batch, num_heads, q_len, kv_len) + mask
        -> row = unflatten(alibi[..., -1:, :], 0, (-1, num_heads)) + mask[..., -1:, :]

Only the last row is ever asked for: a prompt stores which keys are real, a decode step has one query. Layers that
add the same tensors share one row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from specache_fx.capture.graph_edit import call
from specache_fx.capture.graph_utils import shape_of, value_of

_aten = torch.ops.aten


class MaskRow:
    """Inserts the operations; the same operation on the same nodes once.

    Args:
        graph: The graph to insert into.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[Any, Node] = {}
        self.inserted: list[Node] = []

    def of(self, tensor: Node, scores: Node, num_heads: int, before: Node) -> Node:
        """The last query's row of what is added to (or masks) `scores`, with heads in a dimension of their own.

        Args:
            tensor: `[kv_len]`, `[q_len or 1, kv_len]`, the same behind `[num_heads or 1]` or
                `[batch or 1, num_heads or 1]`; where the scores have batch and heads in one dimension,
                `[batch * num_heads or 1, q_len or 1, kv_len]`.
            scores: The scores it is added to.
            num_heads: Heads of the scores.
            before: Where to insert.
        """
        dims = shape_of(tensor) or ()
        if len(dims) > 1:
            tensor = self._call(_aten.slice.Tensor, (tensor, len(dims) - 2, -1), before)
        if len(shape_of(scores) or ()) == 3 and len(dims) == 3 and dims[0] != 1:
            tensor = self._call(_aten.unflatten.int, (tensor, 0, (-1, num_heads)), before)
        return tensor

    def plus(self, row: Node | None, other: Node, before: Node) -> Node:
        """The sum of two rows."""
        return other if row is None else self._call(_aten.add.Tensor, (row, other), before)

    def scaled(self, row: Node | None, factor: float, before: Node) -> Node | None:
        """A row times a number."""
        return row if row is None or factor == 1.0 else self._call(_aten.mul.Tensor, (row, factor), before)

    def hidden(self, row: Node | None, mask: Node, hides: bool, before: Node) -> Node:
        """A row with the least number where `mask` hides (True hides, or True shows)."""
        dtype = torch.float32 if row is None else value_of(row).dtype
        least, base = torch.finfo(dtype).min, 0.0 if row is None else row
        return self._call(torch.where, (mask, least, base) if hides else (mask, base, least), before)

    def _call(self, target: Any, args: tuple[Any, ...], before: Node) -> Node:
        key = (target, repr(args))
        if key not in self._known:
            with self._graph.inserting_before(before):
                self._known[key] = call(self._graph, target, args, before)
            self.inserted.append(self._known[key])
        return self._known[key]

    def forget(self, count: int) -> None:
        """Erase all but the first `count` insertions: what they were for has no known form."""
        for node in reversed(self.inserted[count:]):
            self._graph.erase_node(node)
        kept = set(self.inserted[:count])
        self.inserted = self.inserted[:count]
        self._known = {key: node for key, node in self._known.items() if node in kept}
