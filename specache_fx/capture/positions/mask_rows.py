"""Inserts what masks are computed by, and says which operation of an attention has no place in the normal form."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from specache_fx.capture.graph.graph_edit import call, size_of
from specache_fx.capture.graph.graph_utils import described, value_of


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
