"""Caches understood by moving indices: no operator between a cache and its attention is read.

    keys = cat([past, k], 1); out = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)

Between a cache and the attention lie operators that move elements and compute none. They run on ids, one for each
element of the past and of this call's tokens. The result says where each element of keys and values comes from: the
form of the cache, the past that is appended to, this call's tokens, and the heads that are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.caches.cache_records import Tokens, Written, with_nodes
from specache_fx.capture.caches.id_runs import ROOM, MovedPart, Operand
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    is_float,
    is_integer,
    is_static_input,
    same_sizes,
    shape_of,
    value_of,
)
from specache_fx.runtime.handles.handle_form import (
    FOLDED,
    FORMS,
    HEADS_FIRST,
    MOST_DIMS,
    PAIR,
    dims_of,
    num_sides,
    sides_of,
    token_dim,
)

_STARTS = ((3, 1), (0, 1))
"""The row that tokens are written at, and a step to that of others; the second where a prompt has no room behind 3."""
_aten = torch.ops.aten


class ById:
    """What attentions of a graph read, found by ids. Of equal layers one is run.

    Args:
        gm: The graph, which may be edited between two questions.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._seen: dict[Any, tuple[list[Any] | None, list[Node]]] = {}

    def moved(self, operands: Sequence[Operand], caches: Sequence[Node]) -> list[Written] | None:
        """What keys and values are made of, where caches grow.

        Args:
            operands: Keys and values of an attention.
            caches: Results that may be caches.

        Returns:
            Of keys and of values; None where they are not made of caches by moves alone.
        """

        def find(part: MovedPart) -> list[Written | None]:
            def found_at(sizes: Sequence[tuple[Any, int]]) -> list[Written | None]:
                known = part.run(sizes)
                return [_appended(known, operand, part.related) for operand in operands]

            first = found_at([])
            tokens = [each.q_len for each in first if each]
            tokens += [shape_of(each.buffer)[token_dim(each.form)] for each in first if each and each.buffer]  # type: ignore[index]
            # Behind all numbers in the operators, where these may begin to move something else.
            return first if first == found_at([(size, part.most() + ROOM) for size in tokens]) else [None]

        return self._find(MovedPart(self._gm, operands, caches), find)

    def written(
        self, operands: Sequence[Operand], writes: Mapping[Node, Node | None]
    ) -> list[Written] | None:
        """What keys and values are made of.

        Args:
            operands: Keys and values of an attention.
            writes: The buffer of each value that is written to one (see `Written`).

        Returns:
            Of keys and of values; None where they are moved neither from buffers nor from what is written to these.
        """

        def find(part: MovedPart) -> list[Written | None]:
            def found_at(
                start: int, step: int, before: Sequence[Written | None]
            ) -> tuple[list[Written | None], int]:
                known = part.run(sizes, start, step)
                both = zip(operands, before, strict=True)
                found = [_written(known, *each, writes, part.related) for each in both]
                last = [
                    known[each.tensor].shape[token_dim(each.form)]
                    - known[each.new].shape[token_dim(each.new_form)]
                    for each in found
                    if each is not None
                ]
                return found, min(last, default=0)

            sizes = part.rooms({*writes.values()})
            rooms = [dims[2] for value in part.related if len(dims := shape_of(value) or ()) == 4]
            windows = [room - 1 for room in rooms if isinstance(room, int)]
            for start, step in (*_STARTS, *((last, -1) for last in windows[:1])):
                if step < 0:  # more tokens than a window has room for
                    sizes += [(_num_tokens(operand), ROOM + start + part.most()) for operand in operands]
                first, last = found_at(start, step, [None] * len(operands))
                if None not in first and (step > 0 or all(each.window for each in first if each)):
                    again, _ = found_at(last if step > 0 else max(last + 1, 1), -step, first)
                    return first if again == first else [None]
            return [None]

        found = self._find(MovedPart(self._gm, operands, [*writes]), find, writes)
        return found and [replace(each, buffer=writes[each.tensor]) for each in found]

    def _find(
        self,
        part: MovedPart,
        find: Callable[[MovedPart], list[Any]],
        writes: Mapping[Node, Node | None] | None = None,
    ) -> Any:
        if not part.related:
            return None
        key = part.signature([writes[value] for value in part.related] if writes else ())
        if key not in self._seen:
            made = find(part)
            self._seen[key] = None if None in made else made, part.nodes
        found, nodes = self._seen[key]
        same = dict(zip(nodes, part.nodes, strict=True))
        return with_nodes(found, lambda each: same[each] if isinstance(each, Node) else each)


def _candidates(
    known: dict[Node, Any], operand: Operand, tensors: Iterable[Node]
) -> Iterator[tuple[Node, torch.Tensor, bool]]:
    """Tensors that an operand may be moved from, with its ids `[batch, num_kv_heads, tokens, channels]`.

    And whether these are repeated one after the other, as `repeat` does, and not each by itself.
    """
    read = known.get(operand.node)
    if read is None or not read.numel():
        return
    read = read.mT if operand.transposed else read
    for tensor in (tensor for tensor in tensors if tensor in known):
        heads = [read]
        if read.dim() == 3:  # batch and heads in one
            shape = known[tensor].shape  # has the batch, or the heads
            sizes = [n for size in shape if len(read) % size == 0 for n in (len(read) // size, size)]
            sizes = [operand.num_heads] if operand.num_heads else sorted({*sizes}, reverse=True)
            heads = [read.unflatten(0, (-1, n)) for n in sizes]
        yield from ((tensor, *kv) for each in heads for kv in _kv(each))


def _kv(read: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
    """Heads that are repeated once each; then all, for a cache may have them repeated. See `_candidates`."""
    heads = read.shape[1]
    same = (read[:, 1:] == read[:, :-1]).flatten(2).all(-1).all(0).tolist()
    groups = [*same, False].index(False) + 1
    kv = read[:, ::groups]
    if groups > 1 and heads % groups == 0 and torch.equal(kv.repeat_interleave(groups, 1), read):
        yield kv, False
    yield read, False
    sizes = (n for n in range(1, heads) if heads % n == 0 and groups == 1)
    yield from ((read[:, :n], True) for n in sizes if torch.equal(read[:, n:], read[:, :-n]))


def _num_tokens(operand: Operand) -> Any:
    return (shape_of(operand.node) or ())[-1 if operand.transposed else -2]


def _same_dtypes(*nodes: Node | None) -> bool:
    """Whether tensors have one dtype: ids know nothing of a cast."""
    return len({value_of(node).dtype for node in nodes if node is not None}) == 1


def _appended(known: dict[Node, Any], operand: Operand, caches: Sequence[Node]) -> Written | None:
    """What an operand is made of, where a cache grows."""
    for cache, kv, is_tiled in _candidates(known, operand, caches):
        found = _form(known[cache], kv)
        if found is None or known[cache].numel() != kv.numel() * num_sides(found.form):
            continue
        past, dim = _past_of(known, cache, found.form), token_dim(found.form)
        count = 0 if past is None else known[past].shape[dim]
        inside = ancestors([operand.node]) & ancestors([cache])
        new = _new(known, inside, past, kv[:, :, count:], found.side)
        if new is None or not _same_dtypes(operand.node, cache, new[0], past):
            continue
        made = Written(cache, found.form, found.side, kv.shape[1], is_tiled, *new, past)
        # Sizes are small here, and a slice of more takes nothing away.
        appended = made.q_len if past is None else made.q_len + (shape_of(past) or ())[dim]
        if same_sizes([made.capacity] * 2, [_num_tokens(operand), appended]):
            return made
    return None


def _new(
    known: dict[Node, Any], inside: set[Node], past: Node | None, ids: torch.Tensor, side: int
) -> tuple[Node, str] | None:
    """The last node that has this call's tokens and nothing else, or a pair of them; and its form."""
    behind = set[Node]() if past is None else {past}
    for node in known:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for node in reversed([node for node in known if node in inside - behind and is_float(node, MOST_DIMS)]):
        fits = known[node].numel() in (ids.numel(), 2 * ids.numel())
        found = _form(known[node], ids, (*FORMS, *FOLDED)) if fits else None
        if found is not None and (PAIR not in found.form or found.side == side):
            return node, found.form
    return None


def _past_of(known: dict[Node, Any], cache: Node, form: str) -> Node | None:
    """The input whose tokens are the first ones of a cache, in the same form."""
    whole, dim = known[cache], token_dim(form)
    for node, ids in known.items():
        is_input = node.op == "placeholder" and is_float(node, MOST_DIMS) and not is_static_input(node)
        if is_input and ids.dim() == whole.dim() and 0 < ids.shape[dim] < whole.shape[dim]:
            first = whole.narrow(dim, 0, ids.shape[dim])
            if torch.equal(first, ids):
                return node
    return None


def _written(
    known: dict[Node, Any],
    operand: Operand,
    before: Written | None,
    writes: Mapping[Node, Node | None],
    values: Sequence[Node],
) -> Written | None:
    """What an operand is made of; `before` in another run, where it read some of this call's tokens."""
    for value, kv, is_tiled in _candidates(known, operand, [before.tensor] if before else values):
        place = known, operand, writes[value], value, kv
        found = _rolled(*place) or _in_place(*place, reads_some=before is None)
        if found is not None and _same_dtypes(operand.node, value, found.new, writes[value]):
            return replace(found, is_tiled=is_tiled)
    return None


def _in_place(
    known: dict[Node, Any],
    operand: Operand,
    buffer: Node | None,
    value: Node,
    kv: torch.Tensor,
    *,
    reads_some: bool,
) -> Written | None:
    """Tokens that are written into some rows of a buffer; the operand reads `reads_some` of them."""
    found = _form(known[value], kv)
    if found is None or buffer not in known or known[buffer].shape != known[value].shape:
        return None
    form, heads, num_rows = found.form, kv.shape[1], kv.shape[2]
    whole, old = (sides_of(known[node], form, heads, is_handle=False)[found.side] for node in (value, buffer))
    changed = whole != old
    tokens = changed.transpose(0, 2).flatten(1).any(1).nonzero()
    if not len(tokens):
        return None
    row, count, rows = int(tokens[0]), len(tokens), len(kv)
    ids = whole[:rows, :, row : row + count]
    behind = ancestors([value])
    reads_new = buffer not in ancestors([operand.node])
    new = _new(known, behind, buffer, ids, found.side)
    is_block = bool((changed[:rows, :, row : row + count]).all()) and int(changed.sum()) == ids.numel()
    room = (shape_of(buffer) or ())[token_dim(form)]
    reads_all = num_rows == whole.shape[2] and same_sizes([_num_tokens(operand)], [room])
    first = row if reads_new else 0
    unread = reads_some and found.row + num_rows <= row
    if new is None or not is_block or unread or found.row != first or (reads_new and num_rows != count):
        return None
    numbers = list(range(row, row + count))
    from_end = [number - whole.shape[2] for number in numbers]
    position = _number_in(known, behind, row, numbers, from_end)
    end = None if reads_new or reads_all else _end(known, operand, num_rows)
    if position is None or not (reads_new or reads_all or end is not None):
        return None
    return Written(value, form, found.side, heads, False, *new, None, position, end, reads_new)


def _rolled(
    known: dict[Node, Any], operand: Operand, buffer: Node | None, value: Node, kv: torch.Tensor
) -> Written | None:
    """The newest of the tokens that attention reads, written over the whole of a buffer that has heads first."""
    whole, old = known[value], known.get(buffer)  # type: ignore[arg-type]
    window = (shape_of(value) or ())[2]
    if whole.dim() != 4 or not isinstance(window, int) or kv.shape[2] < window:
        return None
    if not torch.equal(kv[:, :, -window:], whole) or (old is not None and old.shape != whole.shape):
        return None
    held = 0 if old is None else int(torch.isin(kv[0, 0, :, 0], old).sum())
    behind = ancestors([value])
    new = _new(known, behind, buffer, kv[:, :, held:], 0)
    if new is None:
        return None
    position: Any = 0
    if held == 0 and kv.shape[2] > window:
        before = Tokens.NONE
    elif old is not None and held == window - 1 and torch.equal(kv[:, :, :held], old[:, :, 1:]):
        before = Tokens.FULL
    elif old is not None and kv.shape[2] > window and torch.equal(kv[:, :, :held], old[:, :, :held]):
        before, nodes = Tokens.SOME, ancestors([operand.node])
        position = _number_in(known, nodes, held)
    else:
        return None
    if position is None:
        return None
    made = Written(value, HEADS_FIRST, 0, kv.shape[1], False, *new, position=position)
    return replace(made, window=window, before=before)


def _found_by(known: dict[Node, Any], nodes: set[Node], *wanted: Any) -> Node | None:
    """The last of some nodes that is one of the wanted numbers, or a tensor of them; None where none is."""
    for node in reversed([node for node in known if node in nodes]):
        value, kept = known[node], value_of(node)
        if isinstance(kept, torch.Tensor) and kept.dtype in (torch.int32, torch.int64):
            value = value.flatten().tolist()
        elif type(value) is not int:
            continue
        if value in wanted:
            return node
    return None


def _number_in(known: dict[Node, Any], nodes: set[Node], number: int, *others: list[int]) -> Any:
    """What is a number, or a tensor of it or of others; the number where an operator is given it in each run."""
    found = _found_by(known, nodes, number, *others)
    return number if found is None and any(number in node.args for node in nodes) else found


def _end(known: dict[Node, Any], operand: Operand, count: int) -> Any:
    """What says how many of a buffer's first rows an operand reads; None where nothing does."""
    tokens = _num_tokens(operand)
    if isinstance(tokens, int):
        return tokens if tokens == count else None
    sizes = {node for node in ancestors([operand.node]) if is_integer(node)}
    return _found_by(known, {node for node in sizes if same_sizes([value_of(node)], [tokens])}, count)


class _Form(NamedTuple):
    """Where keys or values are in a tensor.

    Attributes:
        form: The tensor's.
        side: Which of a pair they are.
        row: The first of its tokens.
    """

    form: str
    side: int
    row: int


def _form(whole: torch.Tensor, kv: torch.Tensor, forms: Sequence[str] = FORMS) -> _Form | None:
    """The form in which tokens of a tensor are keys or values, all their heads and channels.

    Args:
        whole: Its ids.
        kv: The ids of keys or values, `[batch, num_kv_heads, tokens, channels]`.
        forms: Those that it may have.
    """
    (batch, heads, count, channels), first = kv.shape, kv[0, 0, 0, 0]
    for form in forms:
        dims = dims_of(form)
        if len(dims) != whole.dim() or ((PAIR,) in dims and whole.shape[dims.index((PAIR,))] != 2):
            continue
        merged = next((size for size, dim in zip(whole.shape, dims, strict=True) if len(dim) > 1), heads)
        if merged % heads:
            continue
        for side, part in enumerate(sides_of(whole, form, heads, is_handle=False)):
            if part.shape[1::2] == (heads, channels) and len(part) >= batch:
                rows = (part[0, 0, :, 0] == first).nonzero().flatten().tolist()
                if rows and torch.equal(part[:batch, :, rows[0] : rows[0] + count], kv):
                    return _Form(form, side, rows[0])
    return None
