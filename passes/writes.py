"""Who writes into what: in-place operations, however they are spelt, and the tensors that views look at.

    x.add_(1)   x += 1   x[0] = 1   relu(x, inplace=True)   torch.mul(a, b, out=x)   torch._foreach_mul_([x, y], 2)

No edge leads from a write to what reads its tensor afterwards under another name. Whoever cuts a part out of a graph,
or drops what nothing needs, asks here. Names are told apart by storage: Dynamo's fake tensors share it as the real ones
will, whatever the views are called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node

from specache_fx.passes.graph_utils import target_name, value_of
from specache_fx.passes.randomness import is_off_dropout

_VIEWS = {
    "to", "type", "type_as", "float", "contiguous", "detach", "transpose", "permute", "t", "movedim", "swapaxes",
    "swapdims", "getattr", "getitem", "select", "narrow", "slice", "diagonal", "expand", "expand_as", "reshape", "view",
    "view_as", "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind",
}  # fmt: skip
_KEYWORDS = {"and_", "or_", "not_", "is_"}  # of Python's operator module
_IN_PLACE_FUNCTIONS = {
    "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
}  # fmt: skip
_NUMPY_IN_PLACE = {
    "fill", "sort", "partition", "put", "copyto", "place", "putmask", "fill_diagonal", "resize", "itemset",
}  # fmt: skip


def _in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS


@functools.lru_cache(maxsize=512)
def _inplace_signature(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        found = inspect.signature(target)
    except (TypeError, ValueError):  # built in
        return None
    return found if "inplace" in found.parameters else None


def _is_flagged(node: Node) -> bool:
    """Whether a function was called with `inplace=True`."""
    if node.kwargs.get("inplace"):
        return True
    signature = _inplace_signature(node.target) if callable(node.target) else None
    if signature is None:
        return False
    try:
        return bool(signature.bind(*node.args, **node.kwargs).arguments.get("inplace"))
    except TypeError:
        return False


def _nodes(value: Any) -> list[Node]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in _nodes(item)]
    return [value] if isinstance(value, Node) else []


def schemas_of(target: Any) -> list[Any]:
    """The schemas of an operator, those of all overloads where none was chosen; empty for what is none."""
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, overload)._schema for overload in target.overloads()]
    return [target._schema] if isinstance(target, OpOverload) else []


def written_by(node: Node) -> list[Node]:
    """The tensors that a node writes to, under the names that it has for them."""
    if node.op not in ("call_function", "call_method"):
        return []
    out = _nodes(node.kwargs.get("out"))
    if schemas := schemas_of(node.target):
        written = [
            node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for schema in schemas
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return list(dict.fromkeys(_nodes(written)))
    name = target_name(node).removeprefix("wrapped_")  # Dynamo's name of a function of NumPy's
    if name == "triton_kernel_wrapper_mutation":  # which of its arguments, only the kernel knows
        return _nodes(node.kwargs)
    if name.startswith("__"):
        name = name.strip("_")  # x.__iadd__(y)
    in_place = _in_place_name(name) or name in _IN_PLACE_FUNCTIONS
    in_place = in_place or (name in _NUMPY_IN_PLACE and target_name(node) != name)
    in_place = in_place or (node.op == "call_function" and _is_flagged(node))
    target = node.args[:1] or (node.kwargs.get("input", node.kwargs.get("self")),)
    return out + (_nodes(target) if in_place else [])


def mutates(node: Node) -> bool:
    """Whether a node writes to a tensor that was there before it."""
    return bool(written_by(node))


def storages(node: Node) -> frozenset[Hashable]:
    """The memory that a node's tensors lie in."""
    if is_off_dropout(node):  # gives its input back, which its fake tensor does not show
        return storages(node.all_input_nodes[0])
    value = value_of(node)
    with contextlib.suppress(NotImplementedError):  # of a batched tensor under vmap
        if value is not None:
            return frozenset(tensor.untyped_storage()._cdata for tensor in _tensors(value))
    source = _same_memory(node)
    return frozenset((node,)) if source is None else storages(source)


def _same_memory(node: Node) -> Node | None:
    """What a node is a view of, by its name: where there is no fake tensor to tell."""
    written = written_by(node)
    if len(written) == 1 and target_name(node) != "setitem":
        return written[0]
    if target_name(node) in _VIEWS and node.args and isinstance(node.args[0], Node):
        return node.args[0]
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def written_storages(node: Node) -> frozenset[Hashable]:
    """The memory that a node changes."""
    return frozenset().union(*map(storages, written_by(node)))


def writes_of(nodes: Iterable[Node]) -> dict[Node, frozenset[Hashable]]:
    """Those of the nodes that write, and the memory that each changes."""
    return {node: changed for node in nodes if (changed := written_storages(node))}


def writes_in_place(node: Node) -> bool:
    """Whether a call changes a tensor of the model in place. Of ours only `state` is said to be changed."""
    ours = isinstance(node.target, OpOverload) and node.target.namespace == "specache"
    return not ours and mutates(node)


def mutated_inputs(graph: Graph) -> list[Node]:
    """The inputs that the graph writes to: a recurrent state, a counter."""
    written = frozenset().union(*writes_of(graph.nodes).values())
    return [node for node in graph.nodes if node.op == "placeholder" and storages(node) & written]
