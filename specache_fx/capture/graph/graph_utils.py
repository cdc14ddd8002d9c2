"""Nodes of an FX graph: value, name, source line, inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate
from torch.nn.attention import flex_attention

from specache_fx.runtime.handles import handle_tensor

_aten = torch.ops.aten
_METADATA = {
    "size", "numel", "dim", "ndimension", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
}  # fmt: skip
_MAKES_LIKE = {
    "new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like",
}  # fmt: skip


def value_of(node: Any) -> Any:
    """The fake value of a node (`example_value` in Dynamo's graphs, `val` in ATen's), or the constant itself."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Shape of a tensor node; None for another node."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def shown_shape(node: Any) -> str:
    """Shape of a tensor node in a message, `?` where a size is open."""
    sizes = ("?" if isinstance(size, torch.SymInt) else str(size) for size in shape_of(node) or ())
    return f"[{', '.join(sizes)}]"


def same_sizes(one: Any, other: Any) -> bool:
    """Whether two shapes are known to be equal. To compare symbols otherwise would add a guard."""
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def hint_of(size: Any) -> Any:
    """A size as it is in the call that Dynamo traces, without a guard; None where it depends on data."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def unexpanded(mask: Any) -> Any:
    """The mask that another one was expanded from, over heads or batch: it broadcasts to the same."""
    while isinstance(mask, Node) and mask.target is _aten.expand.default:
        source: Any = mask.args[0]
        if not same_sizes((shape_of(source) or ())[-2:], (shape_of(mask) or ())[-2:]):
            break
        mask = source
    return mask


def is_integer(node: Any) -> bool:
    """Whether a node is a Python or symbolic integer."""
    return (
        isinstance(node, Node)
        and isinstance(value_of(node), (int, torch.SymInt))
        and not isinstance(value_of(node), bool)
    )


def is_integer_tensor(node: Node) -> bool:
    """Whether a node is a tensor of indices."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def is_float(node: Any, dims: int = 4) -> bool:
    """Whether a node is a tensor of floating point numbers, of one dimension or up to that many."""
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and bool(value.dtype.is_floating_point and 0 < value.dim() <= dims)


def device_kind(graph: Graph) -> str:
    """`device.type` of a graph's inputs: the CPU's where all are there, and no bus is between device and host."""
    values = map(value_of, placeholders(graph))
    kinds = (value.device.type for value in values if isinstance(value, torch.Tensor))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def symbols_of(size: Any) -> set[Any]:
    """The free symbols of a size."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


# Dynamo's mark of parameters and buffers, in a placeholder's `tensor_dict`.
STATIC = "_dynamo_static_input_type"


def is_static_input(node: Node) -> bool:
    """Whether a placeholder is a parameter or buffer of the model, growing caches apart (`capture/graph/trace.py`)."""
    return STATIC in node.meta.get("tensor_dict", {})


def source_name(source: Any) -> str:
    """The expression that reads what a source of Dynamo's stands for; empty where there is none."""
    try:
        name = getattr(source, "name", "")
        return str(name() if callable(name) else name)  # a method before torch 2.12
    except NotImplementedError:
        return ""


def weight_name(node: Node) -> str:
    """Name of a parameter, buffer or other tensor in the module whose forward the graph is of.

    Of parameters and buffers that is the one that `named_parameters` has.
    """
    text = source_name(getattr(node.meta.get("grapharg"), "source", None))
    text = re.sub(r"\.__dict__\[['\"](\w+)['\"]\]", r".\1", text)
    found = re.search(r"\._(?:modules|parameters|buffers)\[.*", text) or re.search(
        r"\.\w+(?:\[[^][]*\])*$", text
    )
    names = re.sub(r"\._(?:modules|parameters|buffers)\[['\"](.+?)['\"]\]", r".\1", found[0] if found else "")
    return names.removeprefix(".") or node.name


def target_name(node: Node) -> str:
    """Short name of what a node calls: `cat`, `softmax`, `getitem`, ..."""
    if isinstance(node.target, OpOverload):
        return node.target._opname
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target) if node.op == "call_method" else node.op


def is_pointwise(node: Node) -> bool:
    """Whether each element of a result is computed from one of each operand, as these broadcast."""
    untagged = (_aten._to_copy.default, _aten.floor_divide.default)
    return node.target in untagged or torch.Tag.pointwise in getattr(node.target, "tags", ())


def order_of(node: Any) -> list[int] | None:
    """The dimensions of its tensor in the order that `transpose` or `permute` gives them; None for another node."""
    order = list(range(len(shape_of(node) or ())))
    if order and node.target is _aten.permute.default:
        return [dim % len(order) for dim in node.args[1]]
    if not order or node.target is not _aten.transpose.int:
        return None
    one, other = node.args[1:]
    order[one], order[other] = order[other], order[one]
    return order


def swaps(node: Node, one: int, other: int) -> bool:
    """Whether a node swaps two dimensions of its tensor, as `transpose` or `permute` does."""
    dims = len(shape_of(node) or ())
    moved = [i for i, dim in enumerate(order_of(node) or ()) if i != dim]
    return moved == sorted(dim + dims if dim < 0 else dim for dim in (one, other))


END = 2**63 - 1  # of a slice that goes to the end


def cut_of(node: Any) -> tuple[int, Any, Any, Any] | None:
    """Dimension, start, end (`END` without one) and step of `slice` or `slice_scatter`; None for another node."""
    target = node.target if isinstance(node, Node) else None
    if target not in (_aten.slice.Tensor, _aten.slice_scatter.default):
        return None
    given = node.args[1 if target is _aten.slice.Tensor else 2 :]
    filled: list[Any] = [*given, *(0, None, None, 1)[len(given) :]]
    dim, start, end, step = filled
    dims = shape_of(node) or ()
    return dim % len(dims), 0 if start is None else start, END if end is None else end, step


def largest_number(nodes: Iterable[Node]) -> int:
    """The largest integer among the arguments of some nodes, without its sign; ends of whole slices left out."""
    numbers = [0]
    for node in nodes:
        given = (node.args, node.kwargs)
        map_aggregate(given, lambda each: numbers.append(abs(each)) if type(each) is int else None)
    return max(number for number in numbers if number < END)


def newest(node: Any, dim: int = 2) -> int | None:
    """The number of newest tokens that a slice of them keeps, `[:, :, -n:]` of keys; None for another node."""
    along, start, *rest = cut_of(node) or (None, None)
    return -start if along == dim and isinstance(start, int) and start < 0 and rest == [END, 1] else None


def real_users(node: Node) -> list[Node]:
    """The users that read its numbers."""
    return [user for user in node.users if not reads_shape_only(user)]


def reads_shape_only(user: Node) -> bool:
    """Whether a node reads nothing of its input but shape, dtype or device; in a graph of Dynamo's too."""
    if target_name(user) in _MAKES_LIKE:
        return not any(shape_of(other) for other in user.all_input_nodes[1:])
    if user.op == "call_function" and user.target is getattr:
        return user.args[1] in ("shape", "ndim", "dtype", "device")
    return target_name(user) in _METADATA


def source_of(node: Node) -> str:
    """The line of the model that made a node, "file:line: code": where it calls into transformers' integrations."""
    file, place = _line_of(node)
    return f"{file}{place}"


def described(node: Node) -> str:
    """A node in a message: its name, its operator, and the model's line, without folder."""
    file, place = _line_of(node)
    return f"`{node.name}` ({target_name(node)}{f', {Path(file).name}{place}' if file else ''})"


def _line_of(node: Node) -> tuple[str, str]:
    """File, and line with its code; empty where they are not known."""
    frames = re.findall(
        r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.meta.get("stack_trace") or ""
    )
    passed = (handle_tensor.__file__, flex_attention.__file__)  # Dynamo traces through these
    frames = [frame for frame in frames if frame[0] not in passed]
    frames = [frame for frame in frames if "transformers/integrations" not in frame[0]] or frames
    if not frames:
        return "", ""
    file, line, code = frames[-1]
    code = code.strip()
    rest = "...)" if code.endswith("(") else ""  # of a call over several lines
    return file, f":{line}: {code}{rest}"


def placeholders(graph: Graph) -> list[Node]:
    """The graph's inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def concatenated(node: Any) -> tuple[list[Node], int] | None:
    """The parts of a `cat`, and its dimension counted from the front; None for another node."""
    if not isinstance(node, Node) or node.target is not _aten.cat.default:
        return None
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, Node) for part in parts):
        return None
    return list(parts), dim % len(shape_of(node) or (1,))
