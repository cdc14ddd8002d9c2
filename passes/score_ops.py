"""The operations that attention is spelt out with, under whatever name they come."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from specache_fx.passes.graph_utils import described, reads_shape_only, shape_of, target_name, value_of
from specache_fx.passes.writes import mutates

PRODUCTS = {"matmul", "bmm", "baddbmm"}
CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "clone", "detach"}
RESHAPES = {"view", "reshape", "flatten", "unflatten"}
_SWAPS = {"transpose", "swapaxes", "swapdims"}
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}
_ALIASES = {"div": "truediv", "multiply": "mul", "divide": "truediv", **_IN_PLACE}


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
    """The users that read its numbers and have an effect."""
    return [
        user
        for user in node.users
        if not reads_shape_only(user)
        and (user.users or user.op == "output" or user.is_impure() or mutates(user))
    ]


def is_float(node: Any, dims: int = 4) -> bool:
    """Whether a node is a tensor of floating point numbers, of one dimension or up to that many."""
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and bool(value.dtype.is_floating_point and 0 < value.dim() <= dims)


def name_of(node: Node) -> str:
    """What a node computes, whether it writes into its input or not: nothing else reads the scores."""
    name = target_name(node)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return _ALIASES.get(name, name)


def adds_dimensions(node: Node) -> bool:
    """Whether a node is `x[None, :, None]`."""
    if name_of(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    return all(part is None or part is Ellipsis or part == slice(None) for part in node.args[1])


def drops_last(node: Node) -> bool:
    """Whether a node is `x[..., :-1]`."""
    if name_of(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    *others, last = node.args[1]
    whole = all(other is Ellipsis or other == slice(None) for other in others)
    return (
        whole
        and last == slice(None, -1, None)
        and (Ellipsis in others or len(others) + 1 == len(shape_of(node) or ()))
    )


def swaps_last_two(node: Node) -> bool:
    """Whether a node is `x.transpose(-1, -2)`, however it is written."""
    dims = len(shape_of(node) or ())
    if name_of(node) in _SWAPS and len(node.args) == 3:
        return {dim % dims for dim in node.args[1:]} == {dims - 1, dims - 2}  # type: ignore[operator]
    if name_of(node) == "permute":
        order = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        return tuple(order) == (*range(dims - 2), dims - 1, dims - 2)
    return False
