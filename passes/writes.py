"""Who writes into what: in-place operations, however they are spelt, and the tensors that views look at.

    x.add_(1)   x += 1   x[0] = 1   relu(x, inplace=True)   torch.mul(a, b, out=x)   torch._foreach_mul_([x, y], 2)

No edge leads from a write to what reads its tensor afterwards under another name. Whoever cuts a part out of a graph,
or drops what nothing needs, asks here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from specache_fx.passes.graph_utils import target_name

_VIEWS = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "detach", "alias", "conj", "positive",
    "transpose", "permute", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "real", "imag",
    "view_as_real", "view_as_complex", "getattr", "getitem", "select", "narrow", "slice", "diagonal", "unfold",
    "as_strided", "expand", "expand_as", "broadcast_to", "reshape", "reshape_as", "view", "view_as", "flatten", "ravel",
    "unflatten", "squeeze", "unsqueeze", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit",
    "dsplit", "unbind", "unsafe_chunk", "unsafe_split", "atleast_1d", "atleast_2d", "atleast_3d",
}  # fmt: skip
_IN_PLACE_FUNCTIONS = {
    "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
}  # fmt: skip


def _in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


@functools.lru_cache(maxsize=512)
def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        found = inspect.signature(target)
    except (TypeError, ValueError):  # built in
        return None
    return found if "inplace" in found.parameters else None


def _is_flagged(node: Node) -> bool:
    """Whether a function was called with `inplace=True`."""
    if node.kwargs.get("inplace"):
        return True
    signature = _signature(node.target) if callable(node.target) else None
    if signature is None:
        return False
    try:
        return bool(signature.bind(*node.args, **node.kwargs).arguments.get("inplace"))
    except TypeError:
        return False


def _nodes(value: Any) -> list[Node]:
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in _nodes(item)]
    return [value] if isinstance(value, Node) else []


def written_by(node: Node) -> list[Node]:
    """The tensors that a node writes to, under the names that it has for them."""
    if node.op not in ("call_function", "call_method"):
        return []
    out = _nodes(node.kwargs.get("out"))
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        written = [
            node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return _nodes(written)
    name = target_name(node)
    if name.startswith("__"):
        name = name.strip("_")  # x.__iadd__(y)
    in_place = _in_place_name(name) or name in _IN_PLACE_FUNCTIONS
    in_place = in_place or (node.op == "call_function" and _is_flagged(node))
    return out + (_nodes(node.args[:1]) if in_place else [])


def mutates(node: Node) -> bool:
    """Whether a node writes to a tensor that was there before it."""
    return bool(written_by(node))


def base_of(node: Any) -> Any:
    """The tensor that a view, or a view of a view, looks at; of what was written in place, what it was written into."""
    while isinstance(node, Node):
        written = written_by(node)
        if len(written) == 1 and target_name(node).strip("_") != "setitem":
            node = written[0]
        elif target_name(node) in _VIEWS and node.args and isinstance(node.args[0], Node):
            node = node.args[0]
        else:
            break
    return node


def written_bases(node: Node) -> list[Any]:
    """The tensors that a node changes, seen through all views."""
    return [base_of(target) for target in written_by(node)]


def writes_to(graph: Graph, bases: Iterable[Node]) -> list[Node]:
    """The nodes that change one of these tensors, in order."""
    wanted = set(bases)
    return [node for node in graph.nodes if any(base in wanted for base in written_bases(node))]


def mutated_inputs(graph: Graph) -> list[Node]:
    """The inputs that the graph writes to: a recurrent state, a counter."""
    written = [base for node in graph.nodes for base in written_bases(node)]
    return [node for node in dict.fromkeys(written) if isinstance(node, Node) and node.op == "placeholder"]


_RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
    "normal", "poisson", "binomial", "rrelu", "gumbel_softmax", "uniform_", "normal_", "bernoulli_", "exponential_",
    "random_", "geometric_", "cauchy_", "log_normal_",
}  # fmt: skip
_DROPOUTS = {
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
}


def draws_random_numbers(node: Node) -> bool:
    """Whether a node's result is another one each time."""
    if node.op not in ("call_function", "call_method"):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    name = target_name(node)
    if name not in _DROPOUTS:
        return name in _RANDOM
    rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return bool(rate != 0 and training)
