"""Caches that a model writes in place, as caches that grow: the one form that all passes know.

    keys = index_copy(buffer, 2, position, k)          keys = cat([past, k], 2)                  # an output too
    out = sdpa(q, keys, values, mask)              ->  out = sdpa(q, keys, values, mask[..., :kv_len])
    copy_(buffer, keys)

A buffer has room for `capacity` tokens. Its unwritten rows are read too, and hidden by the mask. The graph that comes
out reads the tokens that are there, and no more. It takes them in the buffer's place, and returns them behind Dynamo's
outputs, keys and values in turn. A prompt has no past: it attends to its own tokens.

Where tokens are written is for the caller to compare with the number of tokens that are there (`FixedCaches`).
Counters of tokens that the graph moves are moved by the caller too.

A buffer that keeps the newest tokens alone is a window: what is returned for it is `keys[:, :, -window + 1 :]`, as of a
cache that grows. Attention that is spelt out stays so: what it adds to scores is cut to the tokens that are there, and
what has the buffer's length in its arguments gets theirs. A graph that reads a buffer in another way stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic

from specache_fx.capture.attention.run_form import mask_of
from specache_fx.capture.caches.buffer_reads import BufferRead
from specache_fx.capture.caches.buffers import (
    DATA,
    REMEDY,
    Buffer,
    FixedCaches,
    asserts_of,
    counters_of,
    of_integers,
    shows_behind,
)
from specache_fx.capture.caches.cache_records import Tokens, Written, with_nodes
from specache_fx.capture.caches.cache_views import heads_first_of, read_sides
from specache_fx.capture.caches.fit_attention import ToTheirLength
from specache_fx.capture.graph.graph_edit import (
    CallsOnce,
    add_placeholder,
    call,
    copy_graph,
    fake_mode_of,
    finish,
    place_behind,
    size_of,
)
from specache_fx.capture.graph.graph_slices import ancestors, cut_out, eliminate_dead_code
from specache_fx.capture.graph.graph_utils import (
    END,
    described,
    placeholders,
    same_sizes,
    shape_of,
    symbols_of,
    value_of,
)
from specache_fx.capture.graph.left_alone import GROW, LEAVE, LeaveAlone, UnknownFormError, sdpa_instead
from specache_fx.capture.graph.trace import inline
from specache_fx.runtime.graph.graph_part import Part
from specache_fx.runtime.handles.handle_form import is_laid_out, token_dim
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
_LENGTH = "specache_kv_len"  # of the past, a symbol that no input of Dynamo's has
_HINT = 2  # tokens of the past where a number is asked for: the fewest that no size is special at


def grow(gm: GraphModule, reads: Sequence[BufferRead], *, has_past: bool) -> tuple[GraphModule, FixedCaches]:
    """The graph with caches that grow.

    Args:
        gm: A functional graph. It stays as it is.
        reads: Its attentions over buffers, of which one keeps all tokens.
        has_past: Whether tokens are there before this call's.

    Returns:
        The graph, and what its caller does about the buffers.

    Raises:
        LeaveAlone: If a cache is read in a way that is not known.
    """
    copies: dict[Node, Node] = {}
    gm = copy_graph(gm, copies)
    mine = with_nodes(list(reads), lambda each: copies.get(each, each))
    rewrite = _Rewrite(gm, mine, has_past)
    try:
        return gm, rewrite.run()
    finally:
        rewrite.forget_guards()


class _Rewrite:
    """The rewrite of one graph."""

    def __init__(self, gm: GraphModule, reads: Sequence[BufferRead], has_past: bool) -> None:
        self._gm, self._graph, self._has_past = gm, gm.graph, has_past
        self._reads = reads
        self._inputs = placeholders(gm.graph)
        self._place: dict[Node | None, int] = {node: i for i, node in enumerate(self._inputs)}
        mode = fake_mode_of(value_of(node) for node in self._inputs)
        assert mode is not None
        self._mode = mode
        self._length = _new_length(mode) if has_past else None
        self._new: dict[_Key, Node] = {}  # this call's tokens, heads first
        self._past: dict[_Key, Node] = {}  # the input of those before it
        self._grown: dict[_Key, Node] = {}  # what a buffer holds now, heads first
        self._ends: dict[Any, bool] = {}
        self._lengths = ToTheirLength(self._graph, reads, self._kv_len, has_past=has_past)

    def run(self) -> FixedCaches:
        shown, hiding = self._shown()
        sides: dict[_Key, Written] = {}
        for read in self._reads:
            self._attention(read, hides=read.attention in hiding)
            for side in read.sides:
                sides.setdefault(_key(side), side)
        written = [*sides.values()]
        counters = counters_of(self._gm)
        conditions, asserts = asserts_of(self._gm)
        rows = [*dict.fromkeys(side.position for side in written if side.before in (Tokens.ANY, Tokens.SOME))]
        new, end = self._new_of(written[0]), self._graph.output_node()
        rooms = [size_of(end, side.tensor, token_dim(side.form)) for side in written]
        sizes = [size_of(end, new, 2), size_of(end, new, 0), rooms]
        numbers = of_integers(self._gm, [*sizes, rows, [*self._ends], conditions, [*counters.values()]])
        placing = ancestors([node for node in (*rows, *self._ends, *conditions) if isinstance(node, Node)])
        moved = {side.buffer for side in written} | counters.keys()
        for node in list(self._graph.nodes):
            if node.target is _aten.copy_.default and node.args[0] in moved:
                self._graph.erase_node(node)
        outputs: list[Any] = list(self._graph.output_node().args[0])  # type: ignore[arg-type]
        kept = {side.tensor for side in written}
        outs = [None if out in kept else out for out in outputs]
        self._graph.output_node().args = ((*outs, *map(self._kept, written)),)
        eliminate_dead_code(self._graph)
        self._check_readers(written)
        buffers = tuple(self._buffer(side, outputs) for side in written)
        finish(self._gm)
        return FixedCaches(
            buffers,
            numbers,
            tuple(i for i in numbers.inputs if self._inputs[i] in placing),
            frozenset(row for row in rows if type(row) is int),
            same_sizes((shape_of(new) or ())[2:3], (1,)),
            tuple(self._ends.values()),
            asserts,
            tuple(self._place[counter] for counter in counters),
            tuple(self._lengths.cut),
            shown,
        )

    def _buffer(self, side: Written, outputs: Sequence[Any]) -> Buffer:
        """What the caller has to know of a buffer; one of a pair is returned once."""
        past = self._past.get(_key(side), side.buffer if side.side == 0 else None)
        inputs = {node: i for i, node in enumerate(placeholders(self._graph))}
        return Buffer(
            self._place.get(side.buffer),
            inputs.get(past),  # type: ignore[arg-type]
            tuple(i for i, out in enumerate(outputs) if out is side.tensor and side.side == 0),
            side.form,
            side.num_kv_heads,
            side.window,
            side.before,
        )

    def _kept(self, side: Written) -> Node:
        """The graph's output for a buffer: all tokens, or the newest of a window."""
        grown = self._grown[_key(side)]
        if side.window is None:
            return grown
        with self._graph.inserting_before(self._graph.output_node()):
            return call(self._graph, _aten.slice.Tensor, (grown, 2, 1 - side.window, END), side.tensor)

    def _check_readers(self, written: Sequence[Written]) -> None:
        """Raise where something is left that reads a buffer."""
        left, grown = set(self._graph.nodes), set(self._grown.values())
        for side in written:
            both: tuple[Any, Any] = side.tensor, side.buffer
            for node in both:
                for user in node.users if node in left - grown else ():
                    if user not in grown and user.target is not _aten.sym_size.int:
                        raise LeaveAlone(
                            f"{described(user)} reads a cache of fixed length, which holds no numbers", REMEDY
                        )

    def _mask_of(self, read: BufferRead, calls: CallsOnce) -> Node | None:
        """The mask of an attention over whole buffers; None where none hides rows behind the tokens."""
        mask: Any = read.attention.args[3] if read.attention.target is SDPA else None
        if read.attention.target is not SDPA:
            outputs = set(self._graph.output_node().all_input_nodes)
            try:
                mask = mask_of(read.attention, read.sides[0].num_kv_heads, outputs, calls)
            except UnknownFormError as error:
                reason = f"an attention reads a cache of fixed length, and {error}"
                raise LeaveAlone(reason, sdpa_instead(read.attention)) from error
        return None if (shape_of(mask) or (1,))[-1] == 1 else mask

    def _shown(self) -> tuple[Part, set[Node]]:
        """`FixedCaches.shown`, before anything is edited; and the attentions whose mask hides rows."""
        calls, masks, hiding = CallsOnce(), dict[Node, None](), set[Node]()
        for read in self._reads:
            if (mask := self._mask_of(read, calls)) is None:
                continue
            masks[mask] = None
            hiding.add(read.attention)
            if any(node.target in DATA for node in ancestors([mask])):
                raise LeaveAlone(
                    f"the mask of {described(read.attention)} is computed from data, not from positions and padding"
                    " alone",
                    f"Compute it from these. Or {GROW}. {LEAVE}.",
                )
        part = cut_out(self._gm, list(masks))
        graph, output = part.graph.graph, part.graph.graph.output_node()
        with graph.inserting_before(next(iter(graph.nodes))):
            kv_len = graph.placeholder("kv_len")
        kv_len.meta["val"] = self._mode.from_tensor(torch.tensor(0))
        found = output.all_input_nodes
        output.args = (tuple(inline(shows_behind, (mask, kv_len), output) for mask in found),)
        finish(part.graph)
        eliminate_dead_code(self._graph)
        return part, hiding

    def forget_guards(self) -> None:
        """Dynamo can't guard the past's length, which is no size of its inputs. `FixedCacheRunner` checks it."""
        if self._length is not None:
            env: Any = self._mode.shape_env
            mine = symbols_of(self._length)
            env.guards[:] = [guard for guard in env.guards if not mine & guard.expr.free_symbols]

    def _attention(self, read: BufferRead, *, hides: bool) -> None:
        """Have an attention read what is there; `hides`: its mask hides the other rows."""
        node, keys = read.attention, read.sides[0]
        reads_all = any(
            side.before is Tokens.ANY and side.end is None and not side.reads_new for side in read.sides
        )
        if not hides and reads_all:
            raise LeaveAlone(
                f"{described(node)} reads all of a cache of fixed length, and no mask hides its unwritten rows",
                f"Give it a mask, or as many rows as there are tokens. {LEAVE}.",
            )
        sides = [self._tokens_of(side, node) for side in read.sides]
        for side in read.sides:
            end = size_of(node, self._new_of(side), 2) if side.reads_new else side.end
            if end is not None:
                self._ends[end] = self._ends.get(end, False) or not hides
        if node.target is SDPA:
            with self._graph.inserting_before(node):
                mask = self._lengths.fitted(node.args[3], read, sides[0])
            node.update_arg(3, mask)
        read_sides(node, read.operands, sides, is_tiled=keys.is_tiled)
        if node.target is not SDPA:
            self._lengths.fit(read, sides[0])

    def _new_of(self, side: Written) -> Node:
        """This call's tokens, `[batch, num_kv_heads, q_len, head_dim]`."""
        if _key(side) not in self._new:
            with self._graph.inserting_before(place_behind([side.new])):
                args = (side.new, side.new_form, side.num_kv_heads, side.side, side.tensor)
                self._new[_key(side)] = heads_first_of(self._graph, *args)
        return self._new[_key(side)]

    def _tokens_of(self, side: Written, attention: Node) -> Node:
        """The tokens that a buffer holds, `[batch, num_kv_heads, kv_len, head_dim]`."""
        new = self._new_of(side)
        if _key(side) in self._grown:
            return self._grown[_key(side)]
        if side.is_input and side.side == 0 and _is_piece(value_of(side.buffer)):
            raise LeaveAlone(
                f"`{side.buffer}` is a piece of another tensor, whose memory can't be given back",
                f"Make a buffer of its own for keys, and one for values, of each layer. {LEAVE}.",
            )
        if not self._has_past:
            return self._grown.setdefault(_key(side), new)
        if side.reads_new:
            raise LeaveAlone(
                f"{described(attention)} reads the tokens of this call, and none that are in the cache",
                "Let it read the cache after they are written to it, or write a prompt as one.",
            )
        if not side.is_input:
            made = f"{described(side.tensor)} writes behind position 0 of a cache that this call makes"
            raise LeaveAlone(made, f"Make the cache before the first call. {LEAVE}.")
        if side.before is Tokens.NONE:
            raise LeaveAlone(
                f"{described(side.tensor)} writes at position 0 of a cache that has tokens", REMEDY
            )
        past = self._past_of(side, new)
        with self._graph.inserting_before(place_behind([new, past])):
            self._grown[_key(side)] = call(self._graph, _aten.cat.default, ([past, new], 2), attention)
        return self._grown[_key(side)]

    def _past_of(self, side: Written, new: Node) -> Node:
        """The input of the tokens before this call's: the buffer; values of a pair have one of their own."""
        buffer: Any = side.buffer
        past = buffer if side.side == 0 else add_placeholder(self._graph, f"{buffer.name}_values", None)
        sizes = list(shape_of(new) or ())
        sizes[2] = side.capacity - 1 if side.before is Tokens.FULL else self._length
        kept = {k: v for k, v in buffer.meta.items() if k != "tensor_dict"}
        past.meta = kept | {"val": value_of(buffer).new_empty(sizes)}
        self._past[_key(side)] = past
        return past

    def _kv_len(self, read: BufferRead, keys: Node, origin: Node) -> Any:
        """Tokens that are there. Not the size of all keys: masks would be computed from them."""
        side = read.sides[0]
        length = size_of(place_behind([keys]), self._new_of(side), 2)
        if self._has_past:
            past = call(self._graph, _aten.sym_size.int, (self._past[_key(side)], 2), origin)
            length = call(self._graph, operator.add, (past, length), origin)
        return length


_Key = tuple[Node, int]


def _key(side: Written) -> _Key:
    """What is the same of all attentions over keys or values."""
    return side.tensor, side.side


def _new_length(mode: Any) -> torch.SymInt:
    """A symbol for the number of tokens that are there."""
    env, source = mode.shape_env, ConstantSource(_LENGTH)
    symbol = env.create_symbol(_HINT, source, DimDynamic.DYNAMIC)
    length: torch.SymInt = env.create_symintnode(symbol, hint=_HINT, source=source)
    return length


def _is_piece(buffer: torch.Tensor) -> bool:
    """Whether other tensors may look at the memory of a buffer that is no handle."""
    if is_laid_out(buffer):
        return False
    held, needed = buffer.untyped_storage().nbytes(), buffer.numel() * buffer.element_size()
    return buffer._is_view() or not same_sizes([held], [needed])
