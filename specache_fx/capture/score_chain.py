"""The scores of attention that is spelt out, from the product of queries and keys to the softmax.

Masks and biases become one row, the newest query's: a prompt stores which keys are real, a decode step has one query.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_edit import call, size_of
from specache_fx.capture.graph_slices import ancestors, constant_of
from specache_fx.capture.graph_utils import (
    described,
    is_float,
    is_static_input,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)

PRODUCTS = {"bmm", "baddbmm"}
LAYOUTS = {"_to_copy", "clone", "reshape"}
_MAXIMA = {"max", "amax", "getitem"}
# A score that is replaced by this or less has probability 0, as one to which it is added.
_FILL_AT_MOST = -1e4
_aten = torch.ops.aten


class UnknownFormError(Exception):
    """An operation that has no place in the normal form.

    Args:
        node: The operation.
        why: What is wrong with it, where the name alone doesn't say.
    """

    def __init__(self, node: Node, why: str = "") -> None:
        super().__init__(
            f"its form is not one that specache knows: {described(node)}{f' {why}' if why else ''}"
        )


class Rows:
    """Inserts what rows of masks are computed by, the same operation on the same nodes once: layers share them.

    Args:
        newest: Of the newest query alone; else of all queries.
    """

    def __init__(self, *, newest: bool = True) -> None:
        self.newest = newest
        self._known: dict[Any, Node] = {}

    def call(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The result of a call; a new one is inserted before a node.

        Raises:
            UnknownFormError: If the shapes don't fit: they were guessed.
        """
        key = (target, repr((args, kwargs)))
        if key not in self._known:
            try:
                with before.graph.inserting_before(before):
                    self._known[key] = call(before.graph, target, args, before, kwargs=kwargs)
            except (IndexError, RuntimeError) as error:
                before.graph.erase_node(before.prev)
                raise UnknownFormError(before, "is of parts whose shapes don't fit each other") from error
        return self._known[key]

    def size(self, before: Node, node: Node, dim: int) -> Any:
        """A size, see `size_of`; the same one once."""
        key = ("size", str(value_of(node).shape[dim]))
        if key not in self._known:
            self._known[key] = size_of(before, node, dim)
        return self._known[key]

    def erase_unused(self, used: set[Node]) -> bool:
        """Erase what nothing in `used` is computed from; returns whether anything is left."""
        for node in reversed(self._known.values()):
            if isinstance(node, Node) and node not in used:
                node.graph.erase_node(node)
        return not used.isdisjoint(self._known.values())


@dataclass
class Scores:
    """Scale, softcap, masks and sinks, as they are met on the way.

    Attributes:
        gm: The graph.
        softmax: Where the chain ends; what computes the mask is inserted before it.
        num_heads: Heads of the scores.
        rows: Computes the mask.
        path: Nodes that are computed from the product of queries and keys, that included.
        scale: Factor on the products.
        softcap: Bound of the scaled products; None where there is none.
        mask: Row of the newest query; None where nothing is added.
        sinks: `[num_heads]`, computed from parameters alone; None where there are none.
        factors: Operators and numbers that the queries are scaled by, which are no constants.
        inner: Nodes beside the path that nothing else needs.
    """

    gm: GraphModule
    softmax: Node
    num_heads: int
    rows: Rows
    path: dict[Node, None]
    scale: float = 1.0
    softcap: float | None = None
    mask: Node | None = None
    sinks: Node | None = None
    factors: list[tuple[Any, Node]] = field(default_factory=list)
    inner: set[Node] = field(default_factory=set)

    def apply(self, node: Node) -> None:
        """Go one step on. What is guessed here is proved afterwards.

        Raises:
            UnknownFormError: If the operation has no place in the normal form.
        """
        name = target_name(node)
        first: Any = node.args[0]
        others = [arg for arg in node.args if not (isinstance(arg, Node) and arg in self.path)]
        other = others[0] if len(others) == 1 and len(node.args) == 2 and not node.kwargs else None
        if name in _MAXIMA and not self._is_of_rows(node):
            raise UnknownFormError(node, "is no maximum over the keys")
        if name in LAYOUTS | _MAXIMA | {"nan_to_num"} or (name == "sub" and not others):
            return  # a row's maximum is subtracted: no softmax notices; no score is NaN
        if self.sinks is not None:
            raise UnknownFormError(node, "comes after the sinks")
        if name == "cat" and isinstance(first, (list, tuple)) and first[0] in self.path:
            self.sinks, beside = self.sinks_behind(first[1:])
            if self.sinks is None:
                raise UnknownFormError(node, "is no column of a sink for each head")
            self.inner |= beside
        elif name == "tanh" and self.mask is None and self.softcap is None:
            self.softcap = 1.0
        elif name == "mul" or (name == "div" and other is not first):
            if not (factor := constant_of(self.gm, other)):
                self._scale_queries(node, other)
                return
            factor = factor if name == "mul" else 1 / factor
            self.scale *= factor
            self.softcap = None if self.softcap is None else self.softcap * abs(factor)
            self.mask = None if self.mask is None else self._times(self.mask, factor)
        elif is_float(other) and (name == "add" or (name == "sub" and other is not first)):
            self.add(other, node, 1.0 if name == "add" else -1.0)
        elif name in ("masked_fill", "where") and len(others) == 2:
            self._fill(node, *others)
        elif name in ("maximum", "clamp", "clamp_min") and (bound := constant_of(self.gm, other)) is not None:
            if bound > torch.finfo(value_of(node).dtype).min:
                raise UnknownFormError(node, "bounds the scores")
        else:
            raise UnknownFormError(node)

    @staticmethod
    def _is_of_rows(node: Node) -> bool:
        """Whether a maximum is one for all keys of a query."""
        if target_name(node) == "getitem" or len(node.args) < 2:
            return True
        given: Any = node.args[1]
        last = len(shape_of(node.args[0]) or ()) - 1
        dims = given if isinstance(given, (list, tuple)) else [given]
        return not dims or any(dim in (-1, last) for dim in dims)

    def _scale_queries(self, node: Node, factor: Any) -> None:
        """Note a number that is no constant, `self.scale = np.sqrt(head_dim)`: queries are multiplied by it instead."""
        is_number = isinstance(value_of(factor), torch.Tensor) and shape_of(factor) == ()
        if not is_number or self.mask is not None or self.softcap is not None:
            raise UnknownFormError(node, "has a factor that is computed in the graph")
        self.factors.append((node.target, factor))

    def add(self, mask: Any, scores: Node, factor: float) -> None:
        """Add a mask to the scores that a node computes, times a factor."""
        row = self._times(self._row(mask, scores), factor)
        self.mask = (
            row if self.mask is None else self.rows.call(self.softmax, _aten.add.Tensor, self.mask, row)
        )

    def _times(self, row: Node, factor: float) -> Node:
        return row if factor == 1.0 else self.rows.call(self.softmax, _aten.mul.Tensor, row, factor)

    def _fill(self, node: Node, mask: Any, fill: Any) -> None:
        """`masked_fill(s, m, fill)`, `where(m, s, fill)` or `where(m, fill, s)`."""
        number = constant_of(self.gm, fill)
        if number is None and isinstance(fill, Node):
            held = f"puts what the tensor `{fill.name}` holds in the place of scores, which may change: give the number"
            raise UnknownFormError(node, f"{held} itself, float('-inf')")
        if number is None or number > _FILL_AT_MOST or value_of(mask).dtype != torch.bool:
            raise UnknownFormError(node, "puts something else than a huge negative in the place of scores")
        base: Any = 0.0 if self.mask is None else self.mask
        least = torch.finfo(torch.float32 if self.mask is None else value_of(base).dtype).min
        hides = target_name(node) == "masked_fill" or node.args[2] in self.path
        sides = (least, base) if hides else (base, least)
        self.mask = self.rows.call(self.softmax, torch.where, self._row(mask, node), *sides)

    def _row(self, tensor: Node, scores: Node) -> Node:
        """Rows of what is added to (or masks) scores, with heads in a dimension of their own."""
        dims = shape_of(tensor) or ()
        if self.rows.newest and len(dims) > 1:
            tensor = self.rows.call(self.softmax, _aten.slice.Tensor, tensor, len(dims) - 2, -1)
        if len(shape_of(scores) or ()) == len(dims) == 3 and dims[0] != 1:  # batch and heads are one
            tensor = self.rows.call(self.softmax, _aten.unflatten.int, tensor, 0, (-1, self.num_heads))
        return tensor

    def sinks_behind(
        self, results: Iterable[Node], stop: Iterable[Node] = ()
    ) -> tuple[Node | None, set[Node]]:
        """The sinks that results are computed from, and the nodes in between; None where that is no sink a head.

        Args:
            results: A column of scores, or a gate.
            stop: What else they may be computed from.
        """
        one_a_head = {
            node for node in self.gm.graph.nodes if same_sizes(shape_of(node) or (), (self.num_heads,))
        }
        sizes = {node for node in self.gm.graph.nodes if shape_of(node) is None}
        ends = {*stop} | one_a_head | sizes
        read = ancestors(results, ends)
        found = list(read & one_a_head)
        leaves = ancestors(found) | read - ends
        if len(found) != 1 or any(node.op == "placeholder" and not is_static_input(node) for node in leaves):
            return None, set()
        return found[0], read - ends
