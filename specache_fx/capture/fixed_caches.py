"""Caches that a model writes in place, as caches that grow: the one form that all passes know.

    keys = index_copy(buffer, 2, position, k)          keys = cat([past, k], 2)                  # an output too
    out = sdpa(q, keys, values, mask)              ->  out = sdpa(q, keys, values, mask[..., :kv_len])
    copy_(buffer, keys)

A buffer has room for `capacity` tokens. Its unwritten rows are read too, and hidden by the mask. The graph that comes
out reads the tokens that are there, and no more. It takes them in the buffer's place, and returns them behind Dynamo's
outputs, keys and values in turn. A prompt has no past: it attends to its own tokens.

Where tokens are written is for the caller to compare with the number of tokens that are there (`FixedCaches.starts`).
Counters of tokens that the graph moves are moved by the caller too.

A buffer that keeps the newest tokens alone is a window: what is returned for it is `keys[:, :, -window + 1 :]`, as of a
cache that grows. Attention that is spelt out is written anew (`capture/buffer_reads.py`). A graph that reads a buffer
in another way stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic

from specache_fx.capture.buffer_masks import DATA, cut_to, is_narrow, shows_behind
from specache_fx.capture.buffer_positions import REMEDY, asserts_of, counters_of, positions_of
from specache_fx.capture.buffer_reads import Reader, is_over, readers_of, reads_buffer, write
from specache_fx.capture.buffer_writes import Append, Tokens, appends, unread, with_windows
from specache_fx.capture.buffers import Buffer, FixedCaches, Size
from specache_fx.capture.buffers_heads_first import BufferForm
from specache_fx.capture.cache_side import GROW, LEAVE, LeaveAlone
from specache_fx.capture.cache_views import WHOLE
from specache_fx.capture.graph_edit import call, copy_graph, fake_mode_of, finish, size_of
from specache_fx.capture.graph_slices import ancestors, cut_out, eliminate_dead_code
from specache_fx.capture.graph_utils import (
    END,
    described,
    placeholders,
    real_users,
    same_sizes,
    shape_of,
    symbols_of,
    value_of,
)
from specache_fx.capture.normalize_attention import SDPA
from specache_fx.capture.trace import inline
from specache_fx.runtime.handle_form import HEADS_FIRST, TOKENS_FIRST, dims_of, is_laid_out, token_dim

_aten = torch.ops.aten
_LENGTH = "specache_kv_len"  # of the past, a symbol that no input of Dynamo's has
_HINT = 2  # tokens of the past where a number is asked for: the fewest that no size is special at


def attends_in_place(gm: GraphModule) -> bool:
    """Whether an attention of a functional graph reads a buffer that keeps all tokens written into it."""
    found = appends(gm.graph)
    written = unread(found)
    return bool(found) and any(reads_buffer(node, found) or is_over(node, written) for node in gm.graph.nodes)


def keeps_windows_alone(gm: GraphModule) -> bool:
    """Whether the only buffers that a functional graph writes tokens into keep the newest ones."""
    if appends(gm.graph):
        return False
    windows = {
        node: append for node, append in with_windows(gm, {}).items() if append.buffer.op == "placeholder"
    }
    return any(reads_buffer(node, windows) for node in gm.graph.nodes)


def has_past(gm: GraphModule) -> bool:
    """Whether the call that a graph is compiled for follows others: it has one token, but for a prompt of one."""
    found = with_windows(gm, appends(gm.graph)).values()
    if any(append.before is not Tokens.ANY for append in found):
        return any(append.before in (Tokens.SOME, Tokens.FULL) for append in found)
    append = next(iter(found))
    return append.buffer.op == "placeholder" and isinstance(append.q_len, int) and append.q_len == 1


def grow(
    gm: GraphModule, forms: Mapping[int, BufferForm], *, has_past: bool
) -> tuple[GraphModule, FixedCaches]:
    """The graph with caches that grow.

    Args:
        gm: A functional graph that `attends_in_place`. It stays as it is.
        forms: The model's, of `buffers_heads_first`.
        has_past: Whether tokens are there before this call's.

    Returns:
        The graph, and what its caller does about the buffers.

    Raises:
        LeaveAlone: If a cache is read in a way that is not known.
    """
    gm = copy_graph(gm)
    rewrite = _Rewrite(gm, forms, has_past)
    try:
        return gm, rewrite.run()
    finally:
        rewrite.forget_guards()


class _Rewrite:
    """The rewrite of one graph."""

    def __init__(self, gm: GraphModule, forms: Mapping[int, BufferForm], has_past: bool) -> None:
        self._gm, self._graph, self._has_past = gm, gm.graph, has_past
        self._forms = forms
        self._inputs = placeholders(gm.graph)
        self._place = {node: i for i, node in enumerate(self._inputs)}
        found = appends(gm.graph)
        own = self._read_unwritten(found)
        self._appends = with_windows(gm, found)
        self._readers = readers_of(gm, self._appends | own)
        self._own = {append.node: new for new, append in own.items()}
        mode = fake_mode_of(value_of(node) for node in self._inputs)
        assert mode is not None
        self._mode = mode
        self._length = _new_length(mode) if has_past else None
        self._grown: dict[Node, Node] = {}  # what a buffer holds now, heads first
        self._masks: dict[Node, Node] = {}
        self._cut: list[int] = []
        self._ends: dict[Any, bool] = {}

    def run(self) -> FixedCaches:
        shown, shown_inputs = self._shown()
        pairs = [pair for reader in self._readers for pair in self._attention(reader)]
        sides = list(dict.fromkeys(pairs))
        written = [self._appends[side] for side in sides]
        counters, counted, counted_inputs = counters_of(self._gm)
        conditions, asserts = asserts_of(self._gm)
        starts, positions, position_inputs = positions_of(self._gm, written, [*self._ends, *conditions])
        moved = {append.buffer for append in written} | {self._inputs[place] for place in counters}
        for node in list(self._graph.nodes):
            if node.target is _aten.copy_.default and node.args[0] in moved:
                self._graph.erase_node(node)
        outputs: list[Any] = list(self._graph.output_node().args[0])  # type: ignore[arg-type]
        kept = {append.written for append in written}
        returned = [tuple(i for i, out in enumerate(outputs) if out is append.written) for append in written]
        outs = [None if out in kept else out for out in outputs]
        self._graph.output_node().args = ((*outs, *map(self._kept, written)),)
        eliminate_dead_code(self._graph)
        self._check_readers(written)
        buffers = tuple(
            Buffer(
                form.place,
                self._place.get(append.buffer),
                places,
                form.form,
                form.num_kv_heads,
                self._capacity(append),
                append.window,
                append.before,
            )
            for append, form, places in zip(written, map(self._form_of, written), returned, strict=True)
        )
        finish(self._gm)
        return FixedCaches(
            buffers, starts, positions, position_inputs, tuple(self._ends.values()), asserts,
            counters, counted, counted_inputs,
            tuple(self._cut), shown, shown_inputs, self._size_source(written[0].q_len), self._batch_of(written[0]),
        )  # fmt: skip

    def _read_unwritten(self, found: Mapping[Node, Append]) -> dict[Node, Append]:
        """The tokens that a prompt attends to and writes into buffers, by themselves."""
        nodes = self._graph.nodes  # what no attention reads is no cache
        own = {
            new: append
            for new, append in unread(found).items()
            if any(is_over(node, {new: append}) for node in nodes)
        }
        for new, append in own.items() if self._has_past else ():
            written = ancestors([append.node], [new])
            first = next(user for user in real_users(new) if user not in written)
            raise LeaveAlone(
                f"{described(first)} reads the tokens of this call, and none that are in the cache",
                "Let it read the cache after they are written to it, or write a prompt as one.",
            )
        return own

    def _kept(self, append: Append) -> Node:
        """The graph's output for a buffer: all tokens, or the newest of a window."""
        grown = self._grown[append.node]
        if append.window is None:
            return grown
        with self._graph.inserting_before(self._graph.output_node()):
            return call(self._graph, _aten.slice.Tensor, (grown, 2, 1 - append.window, END), append.node)

    def _check_readers(self, written: Sequence[Append]) -> None:
        """Raise where something is left that reads a buffer."""
        left = set(self._graph.nodes)
        for append in written:
            grown = self._grown[append.node]
            old = [node for node in (append.node, append.written) if node in left and node is not grown]
            users = [user for node in old for user in node.users]
            if append.buffer.op == "placeholder":
                users += [user for user in append.buffer.users if user is not grown]
            for user in users:
                if user.target is not _aten.sym_size.int:
                    raise LeaveAlone(
                        f"{described(user)} reads a cache of fixed length, which holds no numbers", REMEDY
                    )

    def _shown(self) -> tuple[GraphModule, tuple[int, ...]]:
        """`FixedCaches.shown`, before anything is edited."""
        masks = dict[Node, None]()
        for reader in self._readers:
            if reader.core.mask is not None and not is_narrow(reader.core.mask):
                masks[reader.core.mask] = None
        if any(node.target in DATA for node in ancestors(masks)):
            of_data = [mask for mask in masks if any(node.target in DATA for node in ancestors([mask]))]
            reader = next(reader for reader in self._readers if reader.core.mask in of_data)
            raise LeaveAlone(
                f"the mask of {described(reader.core.node)} is computed from data, not from positions and padding"
                " alone",
                f"Compute it from these. Or {GROW}. {LEAVE}.",
            )
        gm, taken = cut_out(self._gm, list(masks))
        graph, output = gm.graph, gm.graph.output_node()
        with graph.inserting_before(next(iter(graph.nodes))):
            kv_len = graph.placeholder("kv_len")
        kv_len.meta["val"] = self._mode.from_tensor(torch.tensor(0))
        results = []
        with graph.inserting_before(output):
            for mask in output.args[0]:  # type: ignore[union-attr]
                assert isinstance(mask, Node)
                results.append(inline(graph, shows_behind, (mask, kv_len), mask))
        output.args = (tuple(results),)
        return finish(gm), taken

    def forget_guards(self) -> None:
        """Dynamo can't guard the past's length, which is no size of its inputs. `FixedCacheRunner` checks it."""
        if self._length is not None:
            env: Any = self._mode.shape_env
            mine = symbols_of(self._length)
            env.guards[:] = [guard for guard in env.guards if not mine & guard.expr.free_symbols]

    def _attention(self, reader: Reader) -> tuple[Node, Node]:
        """Have an attention read what is there. Returns what its keys and values are views of."""
        node, mask = reader.core.node, reader.core.mask
        (keys, key_ends), (values, value_ends) = reader.keys, reader.values
        with self._graph.inserting_before(node):
            key, value = (self._tokens_of(each, node) for each in (keys, values))
            hides = mask is not None and not is_narrow(mask)
            for append, ends in (reader.keys, reader.values):
                if append.node in self._own:
                    ends.append(size_of(node, self._own[append.node], append.dim))
            for end in (*key_ends, *value_ends):
                self._ends[end] = self._ends.get(end, False) or not hides
            reads_all = keys.before is Tokens.ANY and not (key_ends and value_ends)
            if not hides and reads_all:
                raise LeaveAlone(
                    f"{described(node)} reads all of a cache of fixed length, and no mask hides its unwritten rows",
                    f"Give it a mask, or as many rows as there are tokens. {LEAVE}.",
                )
            out = write(self._graph, reader, key, value, self._mask(mask, keys, key, node))
        node.replace_all_uses_with(out)
        self._graph.erase_node(node)
        return keys.node, values.node

    def _tokens_of(self, append: Append, origin: Node) -> Node:
        """The tokens that a buffer holds, `[batch, num_kv_heads, kv_len, head_dim]`."""
        side = append.node
        if side in self._grown:
            return self._grown[side]
        if append.buffer.op == "placeholder" and _is_piece(
            append.buffer.meta.get(WHOLE, value_of(append.buffer))
        ):
            raise LeaveAlone(
                f"`{append.buffer.name}` is a piece of another tensor, whose memory can't be given back",
                f"Make a buffer of its own for keys, and one for values, of each layer. {LEAVE}.",
            )
        new = self._own.get(side, append.new)
        with self._graph.inserting_before(new.next if side in self._own else side):
            if len(shape_of(new) or ()) == 3:
                new = call(self._graph, _aten.unsqueeze.default, (new, 0), origin)
            if append.dim == 1:
                new = call(self._graph, _aten.transpose.int, (new, 1, 2), origin)
        tokens = new
        if self._has_past:
            if append.buffer.op != "placeholder":
                made = f"{described(side)} writes behind position 0 of a cache that this call makes"
                raise LeaveAlone(made, f"Make the cache before the first call. {LEAVE}.")
            if append.before is Tokens.NONE:
                raise LeaveAlone(f"{described(side)} writes at position 0 of a cache that has tokens", REMEDY)
            sizes = list(shape_of(new) or ())
            sizes[2] = append.capacity - 1 if append.before is Tokens.FULL else self._length
            with self._mode, torch.no_grad():
                value = value_of(append.buffer)
                past = torch.empty(sizes, dtype=value.dtype, device=value.device)
            append.buffer.meta = {
                k: v for k, v in append.buffer.meta.items() if k not in ("tensor_dict", "val")
            } | {"val": past}
            with self._graph.inserting_before(side):
                tokens = call(self._graph, _aten.cat.default, ([append.buffer, new], 2), origin)
        self._grown[side] = tokens
        return tokens

    def _mask(self, mask: Node | None, append: Append, keys: Node, origin: Node) -> Node | None:
        """A mask of the tokens that are there. Inserted at the graph's insertion point."""
        if mask is None or is_narrow(mask):
            return mask
        if mask not in self._masks:
            source = None
            if self._has_past and append.before is Tokens.ANY:
                source = cut_to(mask, shape_of(keys)[2], self._mode, self._attends)  # type: ignore[index]
            if source is not None:
                self._cut.append(self._place[source])
            self._masks[mask] = self._sliced(mask, append, keys, origin) if source is None else mask
        return self._masks[mask]

    def _attends(self, user: Node) -> bool:
        """Whether a node is an attention over buffers."""
        mine = user.target is SDPA and user.args[1] in self._grown.values()
        return mine or any(user in reader.core.inner for reader in self._readers)

    def _sliced(self, mask: Node, append: Append, keys: Node, origin: Node) -> Node:
        told = self._size_source(append.q_len)
        length: Any = told
        if not isinstance(told, int):
            length, dim = self._inputs[told[0]], told[1]
            if dim is not None:
                length = call(self._graph, _aten.sym_size.int, (length, dim), origin)
        if self._has_past:  # not the size of all keys: the mask would be computed from them
            past = call(self._graph, _aten.sym_size.int, (append.buffer, 2), origin)
            length = call(self._graph, operator.add, (past, length), origin)
        dims = shape_of(mask) or ()
        cut = call(self._graph, _aten.slice.Tensor, (mask, len(dims) - 1, 0, length), origin)
        # A slice that may be as long as the whole has the smaller of two sizes.
        with self._mode, torch.no_grad():
            cut.meta["val"] = value_of(mask).new_empty((*dims[:-1], shape_of(keys)[2]))  # type: ignore[index]
        return cut

    def _form_of(self, append: Append) -> BufferForm:
        place = self._place.get(append.buffer)
        form = TOKENS_FIRST if append.dim == 1 else HEADS_FIRST
        heads = (shape_of(append.written) or ())[3 - append.dim]
        return self._forms.get(place, BufferForm(form, heads, place))  # type: ignore[arg-type]

    def _capacity(self, append: Append) -> Size:
        form = self._form_of(append)
        return (
            self._size_source(append.capacity) if form.place is None else (form.place, token_dim(form.form))
        )

    def _batch_of(self, append: Append) -> Size:
        batch = (shape_of(self._grown[append.node]) or ())[0]
        form = self._form_of(append)
        if form.place is not None and same_sizes((shape_of(append.written) or ())[:1], [batch]):
            return form.place, dims_of(form.form).index(("batch",))
        return self._size_source(batch)

    def _size_source(self, size: Any) -> Size:
        if isinstance(size, int):
            return size
        buffers = {each.buffer for each in self._appends.values()}
        for place, node in enumerate(self._inputs):
            if isinstance(value_of(node), torch.SymInt) and same_sizes([value_of(node)], [size]):
                return place, None
            for dim, other in enumerate(shape_of(node) or ()):
                if node not in buffers and same_sizes([other], [size]):
                    return place, dim
        raise LeaveAlone(
            "how many tokens or sequences a call has, or a buffer has room for, can't be told from its inputs",
            REMEDY,
        )


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
