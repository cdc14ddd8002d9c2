"""Attention over a buffer, as long as the tokens that are there: what its scores meet is cut.

    scores = where(mask, scores, -inf)                  scores = where(mask[..., :kv_len], scores, -inf)
    scores.reshape([batch, heads, q_len, capacity])  -> scores.reshape([batch, heads, q_len, kv_len])

A mask that comes in whole may come in cut. Cutting is sound where no shown key's weight depends on hidden rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from specache_fx.capture.caches.buffer_reads import BufferRead
from specache_fx.capture.caches.cache_records import Tokens
from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.graph.graph_slices import ancestors, between
from specache_fx.capture.graph.graph_utils import (
    cut_of,
    described,
    is_pointwise,
    placeholders,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import LeaveAlone, sdpa_instead
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
_BY_COLUMN = {
    "bmm", "_softmax", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute", "clone", "_to_copy", "cat",
    "slice", "max", "amax", "getitem",
}  # fmt: skip
"""What spelt-out attention may do to scores beside pointwise operators: no key's weight depends on hidden ones."""


class ToTheirLength:
    """Cuts what attentions over buffers read beside keys and values.

    Args:
        graph: Their graph, edited in place.
        reads: The attentions.
        kv_len: Gives the number of tokens that are there: of an attention, its keys, and the node that needs it.
        has_past: Whether tokens are there before this call's.

    Attributes:
        cut: Positions of inputs that are masks over the whole buffer, and are to come in cut.
    """

    def __init__(
        self,
        graph: Graph,
        reads: Sequence[BufferRead],
        kv_len: Callable[[BufferRead, Node, Node], Any],
        *,
        has_past: bool,
    ) -> None:
        self._graph, self._kv_len, self._has_past = graph, kv_len, has_past
        self._inputs = placeholders(graph)
        self._inside = {read.attention: _inside(read) for read in reads}
        self._attending = {node for nodes in self._inside.values() for node in nodes}
        self._masks: dict[Node, Node] = {}
        self.cut: list[int] = []

    def fit(self, read: BufferRead, keys: Node) -> None:
        """Have spelt-out attention be as long as the keys that it reads."""
        product, *between, weighted = self._inside[read.attention]
        for node in (product, *between, weighted):
            is_largest = target_name(node) in ("max", "amax")
            if (not is_pointwise(node) and target_name(node) not in _BY_COLUMN) or (
                is_largest and not is_subtracted(node)
            ):
                reason = f"{described(node)} reads scores of rows that were never written in a cache of fixed length"
                raise LeaveAlone(reason, sdpa_instead(read.attention))
            if node in between:  # the products read keys and values
                self._resize(node, read, keys)
            self._note_again(node, read)

    def _resize(self, node: Node, read: BufferRead, keys: Node, source: Node | None = None) -> None:
        """Have a node whose result is as long as a buffer be as long as the keys, or an input `source` that was cut."""

        def kv_len() -> Any:
            if source is None:
                return self._kv_len(read, keys, node)
            # The node may come before this call's tokens do.
            return call(self._graph, _aten.sym_size.int, (source, len(shape_of(source) or ()) - 1), node)

        with self._graph.inserting_before(node):
            args: Any = map_arg(node.args, lambda arg: self.fitted(arg, read, keys))
            whole, cut = [_num_rows(read)], cut_of(node)
            dims = shape_of(node) or ()
            if target_name(node) in ("reshape", "expand") and same_sizes(
                whole, [*map(value_of, args[1][-1:])]
            ):
                args = args[0], [*args[1][:-1], kv_len()], *args[2:]
            elif cut is not None and cut[0] == len(dims) - 1 and same_sizes(whole, [value_of(cut[2])]):
                args = args[0], *cut[:2], kv_len(), cut[3]
            node.args = args

    def _note_again(self, node: Node, read: BufferRead) -> None:
        """Note a node's fake value, one of whose operands has another shape now."""
        args: Any = map_arg(node.args, value_of)
        function: Any = node.target
        try:
            node.meta = {**node.meta, "val": function(*args, **node.kwargs)}
        except Exception as error:  # of any operator: the buffer's length is a number in it
            reason = f"{described(node)} is of the length of a cache of fixed length, not of its tokens"
            raise LeaveAlone(reason, sdpa_instead(read.attention)) from error

    def fitted(self, arg: Any, read: BufferRead, keys: Node) -> Any:
        """An operand of an attention, cut to the tokens that are there. Inserted at the graph's insertion point."""
        if arg in self._attending or not _is_as_long(arg, read):
            return arg
        if arg not in self._masks:
            may_be_cut = self._has_past and read.sides[0].before is Tokens.ANY
            is_cut = may_be_cut and self._cut_input(arg, read, keys)
            self._masks[arg] = arg if is_cut else self._sliced(arg, read, keys)
        return self._masks[arg]

    def _cut_input(self, mask: Node, read: BufferRead, keys: Node) -> bool:
        """Have an input that is a mask over whole buffers come in cut. Returns whether it does.

        It may be read by attentions alone, through what makes one column of each.
        """
        behind = ancestors([mask])
        given = [node for node in self._inputs if node in behind and _is_as_long(node, read)]
        moved = between(given, [mask])
        by_column = (is_pointwise(each) or target_name(each) in ("unsqueeze", "expand") for each in moved[1:])
        users = {user for node in moved for user in node.users} - {*moved}
        is_whole = len(given) == 1 and len(shape_of(given[0]) or ()) > 1 and users <= self._attending
        if not (is_whole and all(by_column) and all(_is_as_long(each, read) for each in moved)):
            return False
        (source,), whole = given, value_of(given[0])
        sizes = (*whole.shape[:-1], (shape_of(keys) or ())[2])
        source.meta = {**source.meta, "val": whole.new_empty_strided(sizes, whole.stride())}
        self.cut.append(self._inputs.index(source))
        for node in moved[1:]:
            self._resize(node, read, keys, source)
            self._note_again(node, read)
        return True

    def _sliced(self, arg: Node, read: BufferRead, keys: Node) -> Node:
        dims = shape_of(arg) or ()
        end = self._kv_len(read, keys, read.attention)
        cut = call(self._graph, _aten.slice.Tensor, (arg, len(dims) - 1, 0, end), read.attention)
        # A slice that may be as long as the whole has the smaller of two sizes.
        cut.meta["val"] = value_of(arg).new_empty((*dims[:-1], shape_of(keys)[2]))  # type: ignore[index]
        return cut


def _inside(read: BufferRead) -> list[Node]:
    """The nodes of an attention, in order: of one that is spelt out, from its first product to its second."""
    if read.attention.target is SDPA:
        return [read.attention]
    product, weighted = (operand.reader for operand in read.operands)
    return between([product], [weighted])


def _num_rows(read: BufferRead) -> Any:
    """Rows of its buffers that an attention reads."""
    keys = read.operands[0]
    return (shape_of(keys.node) or ())[-1 if keys.transposed else -2]


def is_subtracted(largest: Node) -> bool:
    """Whether a largest score is no more than taken off each score: a softmax gives the same without."""
    views = ("getitem", "expand", "unsqueeze", "clone")
    return all(
        (target_name(user) == "sub" and user.args[0] is not largest)
        or (target_name(user) in views and is_subtracted(user))
        for user in largest.users
    )


def _is_as_long(node: Any, read: BufferRead) -> bool:
    """Whether a tensor has a column for each row that an attention reads of its buffers."""
    return same_sizes((shape_of(node) or ())[-1:], [_num_rows(read)])
