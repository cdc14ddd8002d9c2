"""What is done to the scores of an attention that is spelt out, from the product of queries and keys to the softmax."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_slices import ancestors, constant_of
from specache_fx.capture.graph_utils import is_static_input, shape_of, target_name, value_of
from specache_fx.capture.mask_row import MaskRow
from specache_fx.capture.score_ops import CASTS, RESHAPES, UnknownFormError, is_float

# A score that is replaced by this or less has probability 0, as one to which it is added.
_FILL_AT_MOST = -1e4


class ScoreChain:
    """Scale, softcap, masks and sinks, as they are met on the way.

    Args:
        gm: The graph.
        softmax: Where the chain ends; the mask's operations are inserted before it.
        num_heads: Heads of the scores.
        rows: Builds the mask.

    Attributes:
        scale: Factor on the products.
        softcap: Bound of the scaled products; None where there is none.
        mask: The newest query's, as `MaskRow` builds it; None where nothing is added.
        sinks: `[num_heads]`, computed from parameters alone; None where there are none.
        inner: Nodes beside the chain that only the chain needs.
    """

    def __init__(self, gm: GraphModule, softmax: Node, num_heads: int, rows: MaskRow) -> None:
        self._gm, self._softmax, self._num_heads, self._rows = gm, softmax, num_heads, rows
        self._capped = False
        self.scale = 1.0
        self.softcap: float | None = None
        self.mask: Node | None = None
        self.sinks: Node | None = None
        self.inner: set[Node] = set()

    def start(self, product: Node, alpha: float, bias: Node | None, beta: float) -> None:
        """Begin with `alpha * q @ k^T + beta * bias`."""
        self.scale = alpha
        if bias is not None:
            row = self._rows.of(bias, product, self._num_heads, self._softmax)
            self.mask = self._rows.scaled(row, beta, self._softmax)

    def follow(self, path: list[Node]) -> None:
        """Go from the product, first in `path`, to what the softmax reads.

        Raises:
            UnknownFormError: Names the first operation that has no place in the normal form.
        """
        for previous, node in pairwise(path):
            if target_name(node) not in CASTS:
                self._step(node, previous)
        if self._capped and self.softcap is None:
            raise UnknownFormError(path[-1], "bounds the scores at 1")

    def _step(self, node: Node, previous: Node) -> None:
        name, at = target_name(node), self._softmax
        if self.sinks is not None and name != "sub":
            raise UnknownFormError(node, "comes after the sinks")
        if self._capped and self.softcap is None and name != "mul":
            raise UnknownFormError(node, "follows tanh")
        others = [arg for arg in node.args if arg is not previous]
        plain = len(others) == len(node.args) - 1 and not node.kwargs
        if name in RESHAPES or (name == "sub" and plain and self._is_maximum(node, others[0])):
            return
        if self.sinks is not None:
            raise UnknownFormError(node, "comes after the sinks")
        if name in ("mul", "div") and plain:
            self._scale(node, others[0])
        elif name == "tanh" and self.mask is None and not self._capped:
            self._capped = True
        elif name in ("add", "sub") and plain and is_float(others[0]):
            row = self._rows.of(others[0], node, self._num_heads, at)  # type: ignore[arg-type]
            row = self._rows.scaled(row, 1.0 if name == "add" else -1.0, at)  # type: ignore[assignment]
            self.mask = self._rows.plus(self.mask, row, at)
        elif name in ("masked_fill", "where") and not node.kwargs and len(node.args) == 3:
            self._fill(node, previous)
        elif name in ("maximum", "clamp", "clamp_min"):
            self._floor(node, previous)
        elif name == "cat":
            self.sinks = self._column(node)
        else:
            raise UnknownFormError(node)

    def _scale(self, node: Node, other: Any) -> None:
        factor, multiplies = constant_of(self._gm, other), target_name(node) == "mul"
        if not factor:
            raise UnknownFormError(node, "has a factor that is computed in the graph")
        if self._capped and self.softcap is None and multiplies and factor > 0:
            self.softcap, self.scale = factor, self.scale * factor
            return
        if self._capped or (not multiplies and node.args[0] is other):
            raise UnknownFormError(node)
        factor = factor if multiplies else 1 / factor
        self.scale *= factor
        self.mask = self._rows.scaled(self.mask, factor, self._softmax)

    def _is_maximum(self, node: Node, other: Any) -> bool:
        """Whether a node subtracts each row's maximum, which no softmax notices."""
        if target_name(node) != "sub" or not isinstance(other, Node):
            return False
        first = other
        if target_name(other) == "getitem" and other.args[1] == 0 and isinstance(other.args[0], Node):
            first = other.args[0]
        last = (-1, len(shape_of(node) or ()) - 1)
        if target_name(first) not in ("max", "amax") or first.args[0] is not node.args[0]:
            return False
        if first.args[1:] not in [(dim, True) for dim in (*last, *([one] for one in last))]:
            return False
        self.inner |= {first, other}
        return True

    def _fill(self, node: Node, previous: Node) -> None:
        """`masked_fill(s, m, fill)`, `where(m, s, fill)` or `where(m, fill, s)`."""
        filled = target_name(node) == "masked_fill"
        mask = node.args[1] if filled else node.args[0]
        fill = node.args[2] if filled or node.args[1] is previous else node.args[1]
        number = constant_of(self._gm, fill)
        if number is None or number > _FILL_AT_MOST:
            raise UnknownFormError(node, "puts something else than a huge negative in the place of scores")
        if not isinstance(mask, Node) or value_of(mask).dtype != torch.bool:
            raise UnknownFormError(node, "has no boolean mask")
        row = self._rows.of(mask, node, self._num_heads, self._softmax)
        hides = filled or node.args[1] is not previous
        self.mask = self._rows.hidden(self.mask, row, hides, self._softmax)

    def _floor(self, node: Node, previous: Node) -> None:
        """`max(s, finfo.min)`: the number that it is."""
        bounds = [arg for arg in node.args if arg is not previous]
        bound = constant_of(self._gm, bounds[0]) if len(bounds) == 1 else None
        if bound is None or bound > torch.finfo(value_of(previous).dtype).min:
            raise UnknownFormError(node, "bounds the scores")

    def _column(self, node: Node) -> Node:
        """`cat([s, sinks], -1)`: one more column, the same in every row."""
        dim = node.args[1] if len(node.args) > 1 else 0
        sinks: Any = node.args[0][1]  # type: ignore[index]
        while (
            isinstance(sinks, Node)
            and len(shape_of(sinks) or (0,)) > 1
            and target_name(sinks) in CASTS | RESHAPES | {"expand", "unsqueeze"}
        ):
            self.inner.add(sinks)
            sinks = sinks.args[0]
        if dim not in (-1, len(shape_of(node) or ()) - 1) or shape_of(sinks) != (self._num_heads,):
            raise UnknownFormError(node, "is no column of a sink for each head")
        roots = [root for root in ancestors([sinks]) if root.op == "placeholder"]
        if not all(is_static_input(root) for root in roots):
            raise UnknownFormError(node, "has sinks that are computed from data")
        return sinks
