"""`buffers_heads_first`: buffers of fixed length, of any form and written in any way, with heads first.

    kv = slice_scatter(buffer, stack([k, v], 2), 1, start, end)      # [rows, capacity, 2, num_kv_heads, head_dim]
    out = sdpa(q, transpose(kv[:, :end, 0], 1, 2), transpose(kv[:, :end, 1], 1, 2)); copy_(buffer, kv)
        -> keys = slice_scatter(buffer, transpose(k, 1, 2), 2, start, end); copy_(buffer, keys)
           values = slice_scatter(buffer_values, transpose(v, 1, 2), 2, start, end); copy_(buffer_values, values)
           out = sdpa(q, keys[:, :, :end], values[:, :, :end])       # buffer [rows, num_kv_heads, capacity, head_dim]

`by_indices.py` says what an attention reads, whatever moves it; `fixed_caches.py` goes on from here. Rows of the batch
that a call doesn't write stay: `keys = index_copy(buffer[:batch], ...)`, then written into the whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.by_indices import ById, Written
from specache_fx.capture.cache_views import as_in_model, attentions_of, heads_first_of, read_sides, sides_in
from specache_fx.capture.graph_edit import call, copy_graph, fake_mode_of, finish, origin_of, size_of
from specache_fx.capture.graph_slices import eliminate_dead_code
from specache_fx.capture.graph_utils import is_float, placeholders, same_sizes, shape_of, value_of
from specache_fx.capture.heads_first import is_known
from specache_fx.capture.id_runs import Operand
from specache_fx.runtime.handle_form import MOST_DIMS

_aten = torch.ops.aten


class BufferForm(NamedTuple):
    """How the model has a buffer that the graph takes with heads first.

    Attributes:
        form: See `runtime/handle_form.py`.
        num_kv_heads: KV heads.
        place: Position among Dynamo's inputs; None where the graph makes the buffer.
    """

    form: str
    num_kv_heads: int
    place: int | None


def buffers_heads_first(gm: GraphModule) -> tuple[GraphModule, dict[int, BufferForm]]:
    """The graph with its buffers heads first, and their forms, by position among its inputs."""
    if not _copies(gm):
        return gm, {}
    copied = copy_graph(gm)
    rewrite, by_id = _Rewrite(copied), ById(copied)
    for attention, operands in attentions_of(copied):
        found = by_id.written(operands, rewrite.writes)
        if found is not None and is_known(attention, found):
            rewrite.attention(attention, operands, found)
    return (rewrite.finish(), rewrite.forms) if rewrite.forms else (gm, {})


def _copies(gm: GraphModule) -> dict[Node, Node]:
    """What writes to each input of numbers."""
    copies = ((node.args[0], node) for node in gm.graph.nodes if node.target is _aten.copy_.default)
    return {
        buffer: node
        for buffer, node in copies
        if isinstance(buffer, Node) and is_float(buffer, MOST_DIMS) and len(shape_of(buffer) or ()) > 2
    }


class _Rewrite:
    """The rewrite of one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm, self._graph = gm, gm.graph
        self._copies = _copies(gm)
        self.writes: dict[Node, Node] = {buffer: copy.args[1] for buffer, copy in self._copies.items()}  # type: ignore[misc]
        self._places = {node: i for i, node in enumerate(placeholders(gm.graph))}
        self._buffers: dict[Node, list[Node]] = {}
        self._new: dict[tuple[Node, int], Node] = {}  # by buffer and side: this call's tokens
        self._made: dict[tuple[Node, int], tuple[Node, Node]] = {}  # what attention reads, and what is kept
        self._returned: dict[Node, Node] = {}
        self.forms: dict[int, BufferForm] = {}

    def attention(self, attention: Node, operands: Sequence[Operand], found: Sequence[Written]) -> None:
        """Have an attention read its buffers with heads first."""
        for each in found:
            if (each.tensor, each.side) not in self._made:
                self._make(each)
        sides = [self._read(*both) for both in zip(operands, found, strict=True)]
        read_sides(attention, operands, sides, is_tiled=found[0].is_tiled)

    def _make(self, each: Written) -> None:
        """Write a call's keys or values into a buffer that has heads first."""
        if each.tensor not in self._buffers:
            nodes = sides_in(self._graph, each.tensor, each.form, each.num_kv_heads)
            self._buffers[each.tensor], place = nodes, self._places[each.tensor]
            for node in nodes:
                form = BufferForm(each.form, each.num_kv_heads, place)
                self.forms[placeholders(self._graph).index(node)] = form
        with self._graph.inserting_before(self._after([each.new])):
            args = (each.new, each.new_form, each.num_kv_heads, each.side, each.value)
            new = heads_first_of(self._graph, *args)
        buffer = self._buffers[each.tensor][each.side]
        read, kept = self._write(buffer, new, each)
        self._new[each.tensor, each.side], self._made[each.tensor, each.side] = new, (read, kept)
        self._returned.setdefault(each.value, kept)

    def _write(self, buffer: Node, new: Node, each: Written) -> tuple[Node, Node]:
        """What attention reads of a buffer, and what is in it, once new tokens are written."""
        whole, value, origin = buffer, value_of(buffer), each.value
        args: tuple[Any, ...]
        place, rows = self._after([new, each.position]), (shape_of(new) or ())[0]
        with self._graph.inserting_before(place):
            if not same_sizes([rows], [value.shape[0]]):
                rows = size_of(place, new, 0)
                buffer = call(self._graph, _aten.slice.Tensor, (whole, 0, 0, rows), origin)
            if isinstance(value_of(each.position), torch.Tensor):
                position = each.position
                if len(shape_of(position) or ()) > 1:
                    position = call(self._graph, _aten.reshape.default, (position, [-1]), origin)
                read = call(self._graph, _aten.index_copy.default, (buffer, 2, position, new), origin)
            else:
                end = size_of(place, new, 2)
                numbers = isinstance(each.position, int) and isinstance(end, int)
                args = (each.position, end)
                end = sum(args) if numbers else call(self._graph, operator.add, args, origin)
                args = (buffer, new, 2, each.position, end)
                read = self._of_value(_aten.slice_scatter.default, args, value_of(buffer), origin)
            if buffer is whole:
                return read, read
            args = (whole, read, 0, 0, rows)
            return read, self._of_value(_aten.slice_scatter.default, args, value, origin)

    def _read(self, operand: Operand, each: Written) -> Node:
        """The rows that an operand reads."""
        read, new = self._made[each.tensor, each.side][0], self._new[each.tensor, each.side]
        if each.reads_new or each.end is None:
            return new if each.reads_new else read
        batch, heads, _, dim = shape_of(read) or ()
        tokens = (shape_of(operand.node) or ())[-1 if operand.transposed else -2]
        value = value_of(read)
        with fake_mode_of([value]), torch.no_grad():  # type: ignore[union-attr]
            value = value.new_empty((batch, heads, tokens, dim))
        with self._graph.inserting_before(self._after([read, each.end])):
            return self._of_value(_aten.slice.Tensor, (read, 2, 0, each.end), value, operand.node)

    def _of_value(self, target: Any, args: tuple[Any, ...], value: Any, origin: Node) -> Node:
        """Insert a call whose fake value is known: to compute it would add guards on where tokens are written."""
        node = self._graph.call_function(target, args)
        node.meta = {**origin_of(origin), "val": value}
        return node

    def _after(self, nodes: Sequence[Any]) -> Node:
        """The first place behind nodes."""
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        place = max((node for node in nodes if isinstance(node, Node)), key=order.__getitem__).next
        while place.op == "placeholder":
            place = place.next
        return place

    def _read_elsewhere(self, value: Node, kept: list[Node], form: str) -> None:
        """Have what else reads what is in a buffer read what the model has of it: `fixed_caches.py` names it."""
        users = [user for user in value.users if user.op != "output"]
        with self._graph.inserting_before(self._after(kept)):
            whole = as_in_model(self._graph, kept, form, value)
        for user in users:
            user.replace_input_with(value, whole)

    def finish(self) -> GraphModule:
        """Have the model's writes be those of the sides."""
        for buffer, sides in self._buffers.items():
            copy = self._copies[buffer]
            with self._graph.inserting_before(copy):
                for side, node in enumerate(sides):
                    call(self._graph, _aten.copy_.default, (node, self._made[buffer, side][1]), copy)
            self._graph.erase_node(copy)
            form = next(form.form for form in self.forms.values() if form.place == self._places[buffer])
            kept = [self._made[buffer, side][1] for side in range(len(sides))]
            self._read_elsewhere(self.writes[buffer], kept, form)
        output = self._graph.output_node()
        outs: Any = output.args[0]
        output.args = (tuple(self._returned.get(out, out) for out in outs),)
        eliminate_dead_code(self._graph)
        return finish(self._gm)
