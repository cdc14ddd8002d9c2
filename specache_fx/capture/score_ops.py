"""The operators that attention is spelt out with."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from specache_fx.capture.graph_utils import described, reads_shape_only, shape_of, value_of

PRODUCTS = {"bmm", "baddbmm"}
CASTS = {"_to_copy", "clone"}
RESHAPES = {"reshape"}
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


def real_users(node: Node) -> list[Node]:
    """The users that read its numbers."""
    return [user for user in node.users if not reads_shape_only(user)]


def is_float(node: Any, dims: int = 4) -> bool:
    """Whether a node is a tensor of floating point numbers, of one dimension or up to that many."""
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and bool(value.dtype.is_floating_point and 0 < value.dim() <= dims)


def drops_last(node: Node) -> bool:
    """Whether a node is `x[..., :-1]`."""
    last = len(shape_of(node) or ()) - 1
    return node.target is _aten.slice.Tensor and node.args[1:] in ((last, 0, -1), (-1, 0, -1))


def swaps_last_two(node: Node) -> bool:
    """Whether a node is `transpose(x, -1, -2)`, or a `permute` that is."""
    dims = len(shape_of(node) or ())
    if node.target is _aten.transpose.int:
        return {dim % dims for dim in node.args[1:]} == {dims - 1, dims - 2}  # type: ignore[operator]
    if node.target is _aten.permute.default:
        return [dim % dims for dim in node.args[1]] == [*range(dims - 2), dims - 1, dims - 2]  # type: ignore[union-attr, operator]
    return False
