"""Caches understood by moving indices: no operator between a cache and its attention is read.

    keys = cat([past, k], 1); out = sdpa(q, transpose(repeat_kv(keys), 1, 2), ...)

Between a cache and the attention lie operators that move elements and compute none. They run on ids, one for each
element of the past and of this call's tokens. The result says where each element of keys and values comes from: the
form of the cache, the past that is appended to, this call's tokens, and the heads that are repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_slices import ancestors
from specache_fx.capture.graph_utils import (
    cut_of,
    is_float,
    is_static_input,
    same_sizes,
    shape_of,
    target_name,
    value_of,
)
from specache_fx.capture.id_runs import ROOM, Operand, Part
from specache_fx.runtime.handle_form import (
    FOLDED,
    FORMS,
    MOST_DIMS,
    PAIR,
    dims_of,
    num_sides,
    sides_of,
    token_dim,
)

_VIEWS = ("expand", "unsqueeze", "repeat", "reshape", "clone")
_STARTS = (3, 0)  # the row that tokens are written at; the second where a prompt has no room behind the first
_aten = torch.ops.aten


@dataclass(frozen=True)
class Moved:
    """What an operand is made of.

    Attributes:
        tensor: The cache, which is returned.
        form: Its form.
        side: Of a pair: 0 for keys, 1 for values.
        num_kv_heads: Its heads.
        past: The input that tokens are appended to; None in a prompt.
        new: This call's tokens.
        new_form: The form of `new`, which may hold both sides of a pair.
        between: The nodes that move them.
        is_tiled: Heads are repeated one after the other, as `repeat` does, and not each by itself.
        is_read: The operand is computed from the cache itself, and not beside it.
    """

    tensor: Node
    form: str
    side: int
    num_kv_heads: int
    past: Node | None
    new: Node
    new_form: str
    between: frozenset[Node]
    is_read: bool
    is_tiled: bool


@dataclass(frozen=True)
class Written:
    """What an operand is made of, where a buffer of fixed length is written in place.

    Attributes:
        tensor: The input that is written.
        value: All that is in it then.
        form: Its form.
        side: Of a pair: 0 for keys, 1 for values.
        num_kv_heads: Its heads.
        position: Where the first token is written, or where each is: a number, or a node.
        new: This call's tokens.
        new_form: Their form.
        end: Where the rows end that are read; None where all are, or this call's tokens alone.
        reads_new: The operand is this call's tokens, and not read from the buffer.
        is_tiled: See `Moved`.
    """

    tensor: Node
    value: Node
    form: str
    side: int
    num_kv_heads: int
    position: Any
    new: Node
    new_form: str
    end: Any
    reads_new: bool
    is_tiled: bool


class ById:
    """What attentions of a graph read, found by ids. Layers that are alike are run once.

    Args:
        gm: The graph, which may be edited between two questions.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._seen: dict[Any, list[Any] | None] = {}

    def moved(self, operands: Sequence[Operand], caches: Sequence[Node]) -> list[Moved] | None:
        """What keys and values are made of.

        Args:
            operands: Keys and values of an attention.
            caches: Results that may be caches.

        Returns:
            Of keys and of values; None where they are not made of caches by moves alone.
        """

        def find(part: Part) -> list[Moved | None]:
            def found_at(sizes: Sequence[tuple[Any, int]]) -> list[Moved | None]:
                known = part.run(sizes)
                caches = [each for each in part.related if each in known]
                return [_moved(known, operand, caches) for operand in operands]

            first = found_at([])
            if None in first:
                return first
            tokens = [(shape_of(each.new) or ())[token_dim(each.new_form)] for each in first if each]
            tokens += [
                (shape_of(each.past) or ())[token_dim(each.form)] for each in first if each and each.past
            ]
            # Behind all numbers in the operators, where these may begin to move something else.
            return first if first == found_at([(size, part.most() + ROOM) for size in tokens]) else [None]

        return self._find(Part(self._gm, operands, caches), find)

    def written(self, operands: Sequence[Operand], writes: Mapping[Node, Node]) -> list[Written] | None:
        """What keys and values are made of.

        Args:
            operands: Keys and values of an attention.
            writes: What is in each input that is written in place, by the input.

        Returns:
            Of keys and of values; None where they are moved neither from buffers nor from what is written to these.
        """

        def find(part: Part) -> list[Written | None]:
            def found_at(start: int, step: int) -> tuple[list[Written | None], int]:
                known = part.run(rooms, start, step)
                values = {value: buffer for buffer, value in writes.items() if _fits(known, buffer, value)}
                found = [_written(known, operand, values) for operand in operands]
                last = [
                    known[each.tensor].shape[token_dim(each.form)]
                    - known[each.new].shape[token_dim(each.new_form)]
                    for each in found
                    if each is not None
                ]
                return found, min(last, default=0)

            rooms = part.rooms(writes)
            for start in _STARTS:
                first, last = found_at(start, 1)
                if None not in first:
                    return first if found_at(last, -1)[0] == first else [None]
            return [None]

        return self._find(Part(self._gm, operands, [*writes.values()]), find)

    def _find(self, part: Part, find: Callable[[Part], list[Any]]) -> Any:
        if not part.related:
            return None
        key = part.signature()
        if key not in self._seen:
            found = find(part)
            self._seen[key] = None if None in found else [_with(each, part.numbered) for each in found]
        known = self._seen[key]
        return None if known is None else [_with(each, part.node) for each in known]


def _with(record: Any, change: Callable[[Any], Any]) -> Any:
    """A record with other nodes in it."""
    changed = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        changed[field.name] = frozenset(map(change, value)) if isinstance(value, frozenset) else change(value)
    return dataclasses.replace(record, **changed)


def _fits(known: Mapping[Node, Any], buffer: Node, value: Node) -> bool:
    return buffer in known and value in known and bool(known[buffer].shape == known[value].shape)


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
    for tensor in tensors:
        sizes = [operand.num_heads] if operand.num_heads else sorted({*known[tensor].shape}, reverse=True)
        for num_heads in sizes:
            if read.dim() == 4 or len(read) % num_heads == 0:
                heads = read.unflatten(0, (-1, num_heads)) if read.dim() == 3 else read
                yield from ((tensor, *kv) for kv in _kv(heads))


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


def _same_dtypes(*nodes: Node) -> bool:
    """Whether tensors have one dtype: ids know nothing of a cast."""
    return len({value_of(node).dtype for node in nodes}) == 1


def _moved(known: dict[Node, Any], operand: Operand, caches: Sequence[Node]) -> Moved | None:
    for cache, kv, is_tiled in _candidates(known, operand, caches):
        found = _form(known[cache], kv)
        if found is None or known[cache].numel() != kv.numel() * num_sides(found.form):
            continue
        form, dim = found.form, token_dim(found.form)
        behind = [ancestors([node]) for node in (operand.node, cache)]
        between = frozenset(node for node in known if any(node in each for each in behind))
        past = _past_of(known, cache, form)
        count = 0 if past is None else known[past].shape[dim]
        inner = [node for node in known if all(node in each for each in behind)]
        new = _new(known, inner, past, kv[:, :, count:], found.side)
        if new is None or not _same_dtypes(operand.node, cache, new[0], *([past] if past else [])):
            continue
        # Sizes are small here, and a slice of more takes nothing away.
        appended = (shape_of(new[0]) or ())[token_dim(new[1])]
        appended = appended if past is None else appended + (shape_of(past) or ())[dim]
        whole = (shape_of(cache) or ())[dim]
        if same_sizes([whole, whole], [_num_tokens(operand), appended]):
            heads, is_read = kv.shape[1], cache in behind[0]
            return Moved(cache, form, found.side, heads, past, *new, between, is_read, is_tiled)
    return None


def _new(
    known: dict[Node, Any], nodes: Sequence[Node], past: Node | None, ids: torch.Tensor, side: int
) -> tuple[Node, str] | None:
    """The last of some nodes that has this call's tokens and nothing else, or a pair of them; and its form."""
    behind = set[Node]() if past is None else {past}
    for node in known:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for node in reversed([node for node in nodes if node not in behind and is_float(node, MOST_DIMS)]):
        fits = known[node].numel() in (ids.numel(), 2 * ids.numel())
        found = _form(known[node], ids, (*FORMS, FOLDED)) if fits else None
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


def _written(known: dict[Node, Any], operand: Operand, values: Mapping[Node, Node]) -> Written | None:
    for value, kv, is_tiled in _candidates(known, operand, values):
        buffer = values[value]
        if (found := _form(known[value], kv)) is None:
            continue
        form, heads = found.form, kv.shape[1]
        whole, old = (
            sides_of(known[node], form, heads, is_handle=False)[found.side] for node in (value, buffer)
        )
        changed = whole != old
        rows, tokens = changed.flatten(1).any(1).sum(), changed.transpose(0, 2).flatten(1).any(1).nonzero()
        if not len(tokens):
            continue
        row, count = int(tokens[0]), len(tokens)
        ids = whole[:rows, :, row : row + count]
        behind = ancestors([value])
        new = _new(known, [node for node in known if node in behind], buffer, ids, found.side)
        is_block = bool((changed[:rows, :, row : row + count]).all()) and int(changed.sum()) == ids.numel()
        reads_new = buffer not in ancestors([operand.node])
        room = (shape_of(buffer) or ())[token_dim(form)]
        reads_all = found.num_rows == whole.shape[2] and same_sizes([_num_tokens(operand)], [room])
        first = row if reads_new else 0
        if new is None or not is_block or found.row != first or (reads_new and found.num_rows != count):
            continue
        position = _position(known, behind, row, count)
        end = None if reads_new or reads_all else _end(known, operand, found.num_rows)
        is_told = position is not None and (reads_new or reads_all or end is not None)
        if is_told and _same_dtypes(operand.node, buffer, value, new[0]):
            return Written(buffer, value, form, found.side, heads, position, *new, end, reads_new, is_tiled)
    return None


def _position(known: dict[Node, Any], behind: set[Node], row: int, count: int) -> Any:
    """What says where tokens are written: a number, a node, or None where nothing does."""
    found = list[Any]()
    for node in (node for node in known if node in behind):
        args: Any = node.args
        if target_name(node) in ("index_copy", "scatter", "index_put"):
            index = args[1] if target_name(node) == "index_put" else [args[2]]
            found += [_unexpanded(each) for each in index if isinstance(each, Node)]
        elif target_name(node) == "slice_scatter":
            found.append((cut_of(node) or (0, 0))[1])
        elif target_name(node) == "select_scatter":
            found.append(args[3])
    rows = list(range(row, row + count))
    for place in sorted(found, key=lambda each: not isinstance(each, Node)):
        value = known.get(place) if isinstance(place, Node) else place
        value = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
        if value in (row, rows):
            return place
    return None


def _unexpanded(index: Node) -> Node:
    """The tensor of one dimension that an index was expanded from."""
    node: Any = index
    while len(shape_of(node) or ()) > 1 and target_name(node) in _VIEWS:
        node = node.args[0]
    return node


def _end(known: dict[Node, Any], operand: Operand, count: int) -> Any:
    """What says how many of a buffer's first rows an operand reads; None where nothing does."""
    for node in ancestors([operand.node]):
        cut = cut_of(node) if node in known and node.target is _aten.slice.Tensor else None
        if cut is not None and cut[1] == 0:
            end: Any = cut[2]
            if known.get(end, end) == count and same_sizes([value_of(end)], [_num_tokens(operand)]):
                return end
    return None


class _Form(NamedTuple):
    """Where keys or values are in a tensor.

    Attributes:
        form: The tensor's.
        side: Which of a pair they are.
        row: The first of its tokens.
        num_rows: How many.
    """

    form: str
    side: int
    row: int
    num_rows: int


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
                    return _Form(form, side, rows[0], count)
    return None
