"""`normalize_calls`: operations that other passes read have their arguments in their places.

F.softmax(input=s, dim=-1)          ->  F.softmax(s, dim=-1)
torch.matmul(w, other=v)            ->  torch.matmul(w, v)
torch.cat(tensors=[a, b], axis=2)   ->  torch.cat([a, b], 2)
torch.embedding(table, ids)         ->  F.embedding(ids, table)
x.mT, x.mH, of a matrix x.T         ->  torch.transpose(x, -2, -1)    numbers are real
torch.full_like(x, n)               ->  torch.full(shape of x, n)     n computed in the graph: of x only dtype is read
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from specache_fx.passes.base import Pass, PassState
from specache_fx.passes.graph_edit import finish
from specache_fx.passes.graph_utils import shape_of, target_name, value_of

_PAIR = ("input", "other")
_PLACES: dict[str, tuple[str, ...]] = {
    "softmax": ("input", "dim"),
    "tanh": ("input",),
    "bmm": ("input", "mat2"),
    "masked_fill": ("input", "mask", "value"),
    "where": ("condition", *_PAIR),
    "embedding": ("input", "weight"),
    "full_like": ("input", "fill_value"),
    "new_full": ("input", "size", "fill_value"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "transpose": ("input", "dim0", "dim1"),
    "permute": ("input", "dims"),
    **dict.fromkeys(("cat", "concat", "concatenate"), ("tensors", "dim")),
    **dict.fromkeys(
        ("matmul", "add", "sub", "mul", "multiply", "div", "divide", "true_divide", "max", "maximum"), _PAIR
    ),
}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
# Of the attribute, and from torch 2.15 on of an operator.
_TRANSPOSED = {"mT", "mH"}
_TRANSPOSED_MATRIX = {"T", "H", "numpy_T", "matrix_H"}
_ALIASES = {"self": "input", "x": "input", "axis": "dim"}  # NumPy's, and those of tensors' methods


def _fill_places(node: Node) -> bool:
    """Move keyword arguments to their places, up to the first that is missing. Returns whether any was."""
    places = _PLACES.get(target_name(node).rstrip("_"), ())
    if node.target is torch.embedding:
        places = ("weight", "indices")
    kwargs: dict[str, Any] = {_ALIASES.get(name, name): value for name, value in node.kwargs.items()}
    args = list(node.args)
    for name in places[len(args) :]:
        if name not in kwargs:
            break
        args.append(kwargs.pop(name))
    if len(args) == len(node.args):
        return False
    node.args, node.kwargs = tuple(args), kwargs
    return True


def _as_functional(node: Node) -> bool:
    """Make `F.embedding` of `torch.embedding`. Returns whether it was one."""
    if node.target is not torch.embedding or len(node.args) != 2 or node.kwargs:
        return False
    node.target, node.args = F.embedding, (node.args[1], node.args[0])
    return True


def _as_transpose(node: Node) -> bool:
    """Make a `torch.transpose` of an attribute that is one. Returns whether it was."""
    name = str(node.args[1]) if node.target is getattr else target_name(node).partition(".")[0]
    if name not in _TRANSPOSED | _TRANSPOSED_MATRIX or node.op != "call_function":
        return False
    found = value_of(node)
    if not isinstance(found, torch.Tensor) or found.is_complex() or found.dim() < 2:
        return False
    if name in _TRANSPOSED_MATRIX and found.dim() != 2:
        return False
    node.target, node.args = torch.transpose, (node.args[0], -2, -1)
    return True


def _without_example(node: Node) -> bool:
    """Take the tensor out of `full_like(x, n)` or `x.new_full(size, n)` where n is a node. Returns whether it did."""
    name, size, value = target_name(node), shape_of(node), value_of(node)
    places = _PLACES[name] if name in ("full_like", "new_full") else ()
    if not places or len(node.args) != len(places) or set(node.kwargs) - {"dtype", "device"}:
        return False
    if not isinstance(node.args[-1], Node) or not isinstance(value_of(node.args[-1]), _NUMBERS):
        return False
    if size is None or not all(isinstance(each, int) for each in size):
        return False
    node.op, node.target, node.args = "call_function", torch.full, (size, node.args[-1])
    node.kwargs = {"dtype": value.dtype, "device": value.device}
    return True


def normalize_calls(gm: GraphModule, state: PassState) -> GraphModule:
    """Put arguments in their places; what the graph computes stays the same."""
    changed = False
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            for step in (_fill_places, _as_functional, _as_transpose, _without_example):
                changed |= step(node)
    return finish(gm) if changed else gm


NORMALIZE_CALLS = Pass("normalize_calls", normalize_calls)
