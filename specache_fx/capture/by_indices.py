"""Caches understood by moving indices: no operator between a cache and its attention is read.

    keys = cat([past, k], 1); out = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)

Between a cache and the attention lie operators that move elements and compute none. They run on ids, one for each
element of the past and of this call's tokens. The result says where each element of keys and values comes from: the
form of the cache, the past that is appended to, this call's tokens, and the heads that are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from specache_fx.capture.graph_slices import ancestors, extract
from specache_fx.capture.graph_utils import is_static_input, shape_of, target_name, value_of
from specache_fx.capture.random_numbers import Numbers
from specache_fx.runtime.handle_form import AXES, FORMS, PAIR, form_of, sides_of, token_dim

_MOVES = {
    "cat", "stack", "transpose", "permute", "reshape", "expand", "repeat", "unsqueeze", "squeeze", "clone", "_to_copy",
    "slice", "select", "split", "split_with_sizes", "getitem", "index_select", "index", "flatten", "unflatten",
}  # fmt: skip
_aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """Keys or values as an attention reads them.

    Attributes:
        node: `[batch, num_heads, tokens, channels]`, or with batch and heads in one dimension.
        num_heads: Of these.
        transposed: Channels come before tokens.
    """

    node: Node
    num_heads: int
    transposed: bool = False


@dataclass(frozen=True)
class Moved:
    """What an operand is made of.

    Attributes:
        cache: What is returned.
        form: Its form.
        side: Of a pair: 0 for keys, 1 for values.
        num_kv_heads: Its heads.
        past: The input that tokens are appended to; None in a prompt.
        new: This call's tokens.
        new_form: Their form. Of a pair, they are it too.
        between: The nodes that move them.
    """

    cache: Node
    form: str
    side: int
    num_kv_heads: int
    past: Node | None
    new: Node
    new_form: str
    between: frozenset[Node]


class _Ids(Interpreter):
    """Runs a graph in float64, casts left out, and keeps the result of each node."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        if target is _aten._to_copy.default and args[0].is_floating_point():
            return args[0]
        return super().call_function(target, args, kwargs)


def leaves_of(nodes: Iterable[Node]) -> set[Node]:
    """The tensors that others are moved from, and the sizes that say where."""
    inside, leaves, work = set[Node](), set[Node](), list(nodes)
    while work:
        node = work.pop()
        if node in inside:
            continue
        inside.add(node)
        value = value_of(node)
        computes = (
            isinstance(value, torch.Tensor) and value.is_floating_point() and target_name(node) not in _MOVES
        )
        if node.op == "placeholder" or computes:
            leaves.add(node)
        else:
            work += node.all_input_nodes
    return leaves


def moved(gm: GraphModule, operands: Sequence[Operand], caches: Sequence[Node]) -> list[Moved] | None:
    """What keys and values are made of; None where they are not made of caches by moves alone.

    Args:
        gm: The graph.
        operands: Keys and values of an attention.
        caches: Results that may be caches.
    """
    reads = [operand.node for operand in operands]
    leaves = leaves_of(reads)
    tensors = {node for node in leaves if shape_of(node)}
    related = [cache for cache in caches if not tensors.isdisjoint(leaves_of([cache]))]
    if not related:
        return None
    leaves |= leaves_of(related)
    ordered = [node for node in gm.graph.nodes if node in leaves]
    run = _Ids(extract(gm, [*reads, *related], ordered))
    try:
        with torch.no_grad():
            run.run(*_ids(ordered))
    except (RuntimeError, IndexError, TypeError, ValueError):  # sizes that the graph's guards exclude
        return None
    ids = {node.name: value for node, value in run.env.items() if isinstance(value, torch.Tensor)}
    known = {node: ids[node.name] for node in gm.graph.nodes if node.name in ids}
    sides = [_side(known, operand, related) for operand in operands]
    found = [side for side in sides if side is not None]
    return found if len(found) == len(operands) else None


def _ids(leaves: Sequence[Node]) -> list[Any]:
    """A number for each element of tensors of numbers; other leaves are sizes."""
    numbers, values, total = Numbers(leaves[0]), list[Any](), 0
    for leaf in leaves:
        if (shape := shape_of(leaf)) is None:
            value = value_of(leaf)
            values.append(numbers.integer(value) if isinstance(value, (int, torch.SymInt)) else value)
            continue
        sizes = [numbers.integer(size) for size in shape]
        count = math.prod(sizes)
        values.append(torch.arange(total, total + count, dtype=torch.float64).reshape(sizes))
        total += count
    return values


def _side(known: dict[Node, torch.Tensor], operand: Operand, caches: Sequence[Node]) -> Moved | None:
    read = known[operand.node]
    read = read.mT if operand.transposed else read
    read = read.unflatten(0, (-1, operand.num_heads)) if read.dim() == 3 else read
    if read.dim() != 4 or not read.numel():
        return None
    same = (read[:, 1:] == read[:, :-1]).flatten(2).all(-1).all(0).tolist()
    groups = [*same, False].index(False) + 1
    kv = read[:, ::groups]
    if read.shape[1] % groups or not torch.equal(kv.repeat_interleave(groups, 1), read):
        return None
    for cache in caches:
        if (found := _form(known[cache], kv)) is None:
            continue
        form, side = found
        behind = [ancestors([node]) for node in (operand.node, cache)]
        between = frozenset(node for node in known if any(node in each for each in behind))
        past = _past_of(known, cache, form)
        count = 0 if past is None else known[past].shape[token_dim(form)]
        after = set() if past is None else _behind(past, known)
        for new in reversed(
            [node for node in known if node not in after and all(node in each for each in behind)]
        ):
            own = _form(known[new], kv[:, :, count:])
            if own is not None and (PAIR not in own[0] or own[1] == side):
                return Moved(cache, form, side, kv.shape[1], past, new, own[0], between)
    return None


def _behind(past: Node, known: dict[Node, torch.Tensor]) -> set[Node]:
    """The nodes that are moved from a past."""
    found = {past}
    for node in known:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _past_of(known: dict[Node, torch.Tensor], cache: Node, form: str) -> Node | None:
    """The input whose tokens are the first ones of a cache, in the same form."""
    whole, dim = known[cache], token_dim(form)
    for node, ids in known.items():
        is_input = node.op == "placeholder" and not is_static_input(node) and ids.dim() == whole.dim()
        if is_input and 0 < ids.shape[dim] < whole.shape[dim]:
            first = whole.narrow(dim, 0, ids.shape[dim])
            if torch.equal(first, ids):
                return node
    return None


def _form(whole: torch.Tensor, kv: torch.Tensor) -> tuple[str, int] | None:
    """The form in which all elements of a tensor are keys or values, or a pair's.

    Args:
        whole: Its ids.
        kv: The ids of keys or values, `[batch, num_kv_heads, tokens, channels]`.

    Returns:
        The form, and which of a pair `kv` is.
    """
    pair = whole.numel() == 2 * kv.numel() and whole.dim() in (4, 5)
    if not pair and whole.numel() != kv.numel():
        return None
    order = whole.flatten().sort()
    flat = kv.flatten().contiguous()
    place = torch.searchsorted(order.values, flat).clamp(max=whole.numel() - 1)
    if not torch.equal(order.values[place], flat):
        return None
    at = torch.stack(torch.unravel_index(order.indices[place], whole.shape), -1).view(*kv.shape, whole.dim())
    origin = at[0, 0, 0, 0]
    dims: list[list[tuple[int, str]]] = [[] for _ in range(whole.dim())]
    free = list[str]()
    for axis, name in enumerate(AXES):
        if kv.shape[axis] == 1:
            free.append(name)
            continue
        step = at.select(axis, 1)[0, 0, 0] - origin
        (*_, dim), *more = [*step.nonzero().tolist()] or [[-1]]
        if more or dim < 0:
            return None
        dims[dim].append((int(step[dim]), name))
    side = 0
    for dim, size in enumerate(whole.shape):
        if dims[dim]:
            continue
        if pair and size == 2:
            dims[dim], side, pair = [(1, PAIR)], int(origin[dim]), False
        elif size == 1 and free:
            dims[dim] = [(1, free.pop(0))]
        else:
            return None
    if pair or [name for name in free if name != "heads"]:
        return None
    for dim in dims if free else ():  # one head of channels that are merged with it
        dim[:] = [(1, "channels"), (kv.shape[3], "heads")] if dim == [(1, "channels")] else dim
    form = form_of([[name for _, name in sorted(dim, reverse=True)] for dim in dims])
    if form not in FORMS:
        return None
    sides = sides_of(whole, form, kv.shape[1], is_handle=False)
    return (form, side) if side < len(sides) and torch.equal(sides[side], kv) else None
