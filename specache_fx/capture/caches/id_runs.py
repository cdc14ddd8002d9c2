"""Runs of a part of a graph on ids: a number for each element, which the operators of the part only move."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from specache_fx.capture.attention.random_numbers import Numbers
from specache_fx.capture.graph.graph_slices import ancestors, extract
from specache_fx.capture.graph.graph_utils import (
    cut_of,
    is_float,
    is_static_input,
    largest_number,
    shape_of,
    symbols_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.segments import Segment
from specache_fx.runtime.handles.handle_form import MOST_DIMS

_MOVES = {
    "cat", "stack", "transpose", "permute", "reshape", "expand", "repeat", "unsqueeze", "squeeze", "clone", "_to_copy",
    "slice", "select", "split", "split_with_sizes", "getitem", "index_select", "index", "flatten", "unflatten",
}  # fmt: skip
_MOVES |= {"index_copy", "index_put", "slice_scatter", "select_scatter", "scatter", "roll"}
ROOM = 40
"""Rows of a buffer, or tokens, beyond all sizes and numbers that are known."""
_aten = torch.ops.aten
MADE = (_aten.zeros.default, _aten.full.default, _aten.new_zeros.default, _aten.zeros_like.default)


@dataclass(frozen=True)
class Operand:
    """Keys or values as an attention reads them.

    Attributes:
        node: `[batch, num_heads, tokens, channels]`, or with batch and heads in one dimension.
        reader: The SDPA or the product that reads it.
        num_heads: Of these; None where they can't be told from the batch.
        transposed: Channels come before tokens.
    """

    node: Node
    reader: Node
    num_heads: int | None
    transposed: bool = False


class _Ids(Interpreter):
    """Runs a graph in float64, casts left out, and keeps the result of each node."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        if target is _aten._to_copy.default and args[0].is_floating_point():
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)


class MovedPart:
    """The part of a graph between an attention's operands and what these are moved from.

    Attributes:
        related: The results that are moved from the same.
        nodes: All of it, in order.
    """

    def __init__(self, gm: GraphModule, operands: Sequence[Operand], results: Sequence[Node]) -> None:
        self._gm, self._operands = gm, operands
        self._reads = [operand.node for operand in operands]
        leaves = leaves_of(self._reads)
        # Equal calls are one call: all buffers that a call makes may be the same zeros.
        numbers = {leaf for leaf in leaves if is_float(leaf, MOST_DIMS) and leaf.target not in MADE}
        self.related = [result for result in results if not numbers.isdisjoint(leaves_of([result]))]
        leaves |= leaves_of(self.related)
        inside = ancestors([*self._reads, *self.related], leaves)
        self.nodes = [node for node in gm.graph.nodes if node in inside]
        self._leaves = [node for node in self.nodes if node in leaves]

    def signature(self, more: Iterable[Node | None] = ()) -> Any:
        """Equal for parts that do the same, and whose nodes `more` are in the same places; symbols of sizes apart."""
        ends = (
            *self._reads,
            *self.related,
            *(node for node in more if node is not None and node in self.nodes),
        )
        may_be_past = {
            leaf for leaf in self._leaves if leaf.op == "placeholder" and not is_static_input(leaf)
        }
        inner = (node for node in self.nodes if node not in self._leaves)
        part = Segment(tuple(inner), tuple(self._leaves), ends)
        reads = ((each.num_heads, each.transposed) for each in self._operands)
        return part.fingerprint(may_be_past, with_offsets=False), str([*reads])

    def most(self) -> int:
        """The largest number that says which elements are moved."""
        computed = (node for node in self.nodes if is_float(node, MOST_DIMS) and cut_of(node) is None)
        return largest_number({*self.nodes} - {*self._leaves, *computed})

    def rooms(self, buffers: Collection[Node | None]) -> list[tuple[Any, int]]:
        """Open sizes of buffers, and how many rows they are to have."""
        sizes = {leaf: shape_of(leaf) or () for leaf in self._leaves if is_float(leaf, MOST_DIMS)}
        others = [size for leaf, shape in sizes.items() if leaf not in buffers for size in shape]
        longest = max((size for size in others if isinstance(size, int)), default=0)
        taken = {symbol for size in others for symbol in symbols_of(size)}
        own = [size for leaf, shape in sizes.items() if leaf in buffers for size in shape]
        return [(size, ROOM + self.most() + longest) for size in own if taken.isdisjoint(symbols_of(size))]

    def run(self, sizes: Sequence[tuple[Any, int]], start: int = 0, step: int = 1) -> dict[Node, Any]:
        """The ids of tensors, and the numbers of sizes; nothing where it can't be run.

        Args:
            sizes: Open sizes, and what they are to be.
            start: Where tokens are written.
            step: Inputs that may say so get numbers that are so far apart.
        """
        run = _Ids(extract(self._gm, [*self._reads, *self.related], self._leaves))
        try:
            with torch.no_grad():
                run.run(*self._ids(sizes, start, step))
        except (RuntimeError, IndexError, TypeError, ValueError):  # sizes that the graph's guards exclude
            return {}
        found = {node.name: value for node, value in run.env.items()}
        return {node: found[node.name] for node in self.nodes if node.name in found}

    def _ids(self, wanted: Sequence[tuple[Any, int]], start: int, step: int) -> list[Any]:
        numbers, values, total = Numbers(self._leaves[0]), list[Any](), 0
        for size, number in wanted:
            numbers.assign(size, number)
        floats = [leaf for leaf in self._leaves if is_float(leaf, MOST_DIMS)]
        sized = {symbol for leaf in floats for size in shape_of(leaf) or () for symbol in symbols_of(size)}
        tokens = (shape_of(self._reads[0]) or ())[-1 if self._operands[0].transposed else -2]
        for leaf in self._leaves:
            value = value_of(leaf)
            if isinstance(value, torch.Tensor):
                if value.dim() == 1 and sized.isdisjoint(symbols_of(value.shape[0])):
                    numbers.assign(
                        value.shape[0], numbers.integer(tokens)
                    )  # positions: Dynamo has a symbol for each
                shape = [numbers.integer(size) for size in value.shape]
                first = total if leaf in floats else start
                ids = torch.arange(first, first + math.prod(shape), device="cpu").reshape(shape)
                total, start = (total + ids.numel(), start) if leaf in floats else (total, start + step)
                value = ids.to(torch.float64 if leaf in floats else value.dtype)
            elif isinstance(value, torch.SymInt):
                if sized.isdisjoint(symbols_of(value)):
                    numbers.sizes |= dict.fromkeys(symbols_of(value) - numbers.sizes.keys(), start)
                    start += step
                value = numbers.integer(value)
            values.append(value)
        return values


def leaves_of(nodes: Iterable[Node]) -> set[Node]:
    """The tensors that others are moved from, and the sizes that say where."""
    inside, leaves, work = set[Node](), set[Node](), list(nodes)
    while work:
        node = work.pop()
        if node in inside:
            continue
        inside.add(node)
        computes = is_float(node, MOST_DIMS) and (target_name(node) not in _MOVES or _casts(node))
        if node.op == "placeholder" or computes:
            leaves.add(node)
        else:
            work += node.all_input_nodes
    return leaves


def _casts(node: Node) -> bool:
    """Whether a node has another dtype than what it reads: ids know nothing of that."""
    read = (value_of(each) for each in node.all_input_nodes[:1])
    dtypes = {value.dtype for value in read if isinstance(value, torch.Tensor)}
    return target_name(node) == "_to_copy" and dtypes != {value_of(node).dtype}
