"""Handles: placeholders that the model passes around in place of its KV cache.

A handle has the shape that the model expects, `[batch, num_kv_heads, kv_len, head_dim]`, and next to no memory. All
handles of a session look at one storage. So storage identity names the session, and the storage dies with the last
handle. It holds one row of `head_dim` elements per slot and batch row, where a handle's first token begins,
then a ruler of about `kv_len` elements:

    element [b, h, t, d] of slot s  =  storage[offset(s) + b * head_dim + 2 * h + t + d]

Strides are 2 over heads and 1 over tokens. A crop at the end keeps the offset, and a session can follow it. Cutting off
the oldest tokens moves the offset, and is refused. No two heads are alike: a copy whose heads were permuted is no copy.

Most elements are NaNs. Payload bits of the rows spell (magic, session, slot, row, process). Those of the ruler are a
sequence in which no stretch comes twice. They survive every copy. So a copied cache, or one whose rows
were permuted, can be told from the original; and one whose tokens were chosen, from one that was cropped (`matches`).
A reader that takes a handle for a KV cache gets NaN, never an answer that is a little wrong.

NaNs survive arithmetic too. So every eighth element is a number: a cache that was scaled, clamped or averaged is no
copy any more. Code outside of graphs doesn't get so far: to it a handle is a `Handle` (`handle_tensor.py`).
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, call, is_

import torch

from specache_fx.runtime.handles.handle_form import HEAD_STRIDE, MOST_DIMS

MAGIC = 0x5CA
_FIELDS = (("magic", 12), ("session", 24), ("slot", 12), ("row", 16), ("process", 24))  # 88 bits
_CODE_BITS = sum(bits for _, bits in _FIELDS)
MAX_SESSION = 1 << 24
_FILLER = 0x2A  # payload of the NaNs behind a row's code: no computation makes such a one
_NUMBER_EVERY = 8  # elements; heads have room for a number behind the code
_SLACK = 512  # elements by which a ruler grows at least
_version_of = attrgetter("_version")


@dataclass(frozen=True)
class _NanBox:
    """NaN payloads in one dtype: the integer view, the quiet NaN, and the free payload bits below it."""

    integer: torch.dtype
    quiet_nan: int
    bits: int

    @property
    def code_length(self) -> int:
        """Elements that a code takes."""
        return -(-_CODE_BITS // self.bits)


_BOXES = {
    torch.bfloat16: _NanBox(torch.int16, 0x7FC0, 6),
    torch.float16: _NanBox(torch.int16, 0x7E00, 9),
    torch.float32: _NanBox(torch.int32, 0x7FC00000, 22),
    torch.float64: _NanBox(torch.int64, 0x7FF8000000000000, 50),
}


@dataclass(frozen=True)
class HandleCode:
    """One batch row of a handle: its session, its slot (2 * layer, + 1 for values), its row, its process."""

    session: int
    slot: int
    row: int
    process: int

    @property
    def is_ours(self) -> bool:
        """Whether this process made it. One that was saved and loaded elsewhere names no session here."""
        return self.process == _process.number


@dataclass(frozen=True)
class Newest:
    """The handles that a session returned last, known by identity: of a handle nothing but its version can change.

    Attributes:
        handles: Keys and values in turn, layer by layer; they keep nothing alive.
        kv_len: Tokens that they have.
    """

    handles: Sequence[weakref.ref[torch.Tensor]]
    kv_len: int

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors are these, all of them and in order."""
        return len(tensors) == len(self.handles) and all(map(is_, map(call, self.handles), tensors))


class _Process:
    """A number that no other process has, not even a child of this one."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.number = secrets.randbits(24)


_process = _Process()


DTYPES = frozenset(_BOXES)
"""Of handles."""


def unfit_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why no handle fits into rows of `head_dim` elements of `dtype`, or None if one does."""
    box = _BOXES.get(dtype)
    if box is None:
        return f"its KV cache has dtype {dtype}, not one of {', '.join(str(d) for d in _BOXES)}"
    if head_dim <= box.code_length:
        return f"its head_dim of {head_dim} is under {box.code_length + 1}, the least for {dtype}"
    return None


def _encode(
    session: int, slots: Sequence[int], batch: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """The rows `[len(slots), batch, head_dim]` of slots, on the CPU: the code, then filler with numbers in it."""
    box = _BOXES[dtype]
    parts = []  # of each code, one an element
    for slot, row in itertools.product(slots, range(batch)):
        code, shift = 0, 0
        for (_, bits), value in zip(_FIELDS, (MAGIC, session, slot, row, _process.number), strict=True):
            code |= value << shift
            shift += bits
        parts.append([code >> at * box.bits & (1 << box.bits) - 1 for at in range(box.code_length)])
    coded = torch.full(
        (len(slots), batch, head_dim), box.quiet_nan + _FILLER, dtype=torch.int64, device="cpu"
    )
    codes = torch.tensor(parts, dtype=torch.int64, device="cpu").view(len(slots), batch, box.code_length)
    coded[..., : box.code_length] = box.quiet_nan + codes
    place = torch.arange(head_dim, device="cpu")
    numbers = (place >= box.code_length) & (
        (place % _NUMBER_EVERY == _NUMBER_EVERY - 1) | (place == head_dim - 1)
    )
    rows = torch.arange(batch, device="cpu")[:, None] << 12
    seeds = (
        (torch.tensor(slots, dtype=torch.int64, device="cpu")[:, None, None] << 40) + rows + place + session
    )
    coded = torch.where(numbers, _as_integers(_numbers(_hash(seeds)), dtype), coded)
    return coded.to(box.integer).view(dtype)


def _all_rows(session: int, dims: Sequence[int], batch: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows of all slots, of `dims[slot]` elements each, one behind the other: 1-D."""
    rows: dict[int, torch.Tensor] = {}
    for dim in set(dims):
        slots = [slot for slot, other in enumerate(dims) if other == dim]
        rows |= zip(slots, _encode(session, slots, batch, dim, dtype).flatten(1), strict=True)
    return torch.cat([rows[slot] for slot in range(len(dims))])


def _hash(place: torch.Tensor) -> torch.Tensor:
    """A multiplicative hash, int64 as its argument, of 30 bits or so."""
    mixed = (place * 0x5851F42D4C957F2D + 0x14057B7EF767814F) >> 33  # int64 wraps around
    return (mixed ^ (mixed >> 15)) * 0x2C1B3C6D >> 7


def _numbers(hashes: torch.Tensor) -> torch.Tensor:
    """Negative numbers between -4 and -2 that every dtype of `_BOXES` holds exactly, few of them whole."""
    return -2 - hashes.remainder(128).to(torch.float64) / 64


def _as_integers(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of numbers in a dtype, as int64."""
    return numbers.to(dtype).view(_BOXES[dtype].integer).to(torch.int64)


def decode(handle: torch.Tensor) -> list[HandleCode] | None:
    """Read the codes of a handle, or of a copy of one (a device-to-host copy of a few bytes).

    Args:
        handle: `[batch, num_kv_heads, kv_len, head_dim]`, or of another `Form` that has rows first.

    Returns:
        One code per batch row, or None if the tensor is no handle.
    """
    return _codes(handle[:, 0, 0] if handle.dim() == 4 else handle[:, 0]) if _may_be_one(handle) else None


def first_code(handle: torch.Tensor) -> HandleCode | None:
    """The code of the first batch row of a handle or of a copy of one, in any `Form`; None of another tensor."""
    looks = [handle, handle.mT] if handle.dim() > 3 else [handle]  # channels may come before tokens
    rows = (first_row(look)[None] for look in looks if _may_be_one(look))
    return next((codes[0] for codes in map(_codes, rows) if codes is not None), None)


def _may_be_one(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a dtype and dimensions that a handle may have, channels last."""
    fits = 3 <= tensor.dim() <= MOST_DIMS and 0 not in tensor.shape
    return fits and unfit_reason(tensor.dtype, tensor.shape[-1]) is None


def _codes(rows: torch.Tensor) -> list[HandleCode] | None:
    """The codes that first elements spell, `[batch, head_dim]`; None where one spells none."""
    box = _BOXES[rows.dtype]
    seen = rows.detach().cpu().contiguous().view(box.integer)
    codes = []
    for row in seen.to(torch.int64) - box.quiet_nan:
        elements = row[: box.code_length].tolist()
        if any(not 0 <= element < 1 << box.bits for element in elements):
            return None
        code, fields = sum(element << (i * box.bits) for i, element in enumerate(elements)), {}
        for name, bits in _FIELDS:
            fields[name] = code & ((1 << bits) - 1)
            code >>= bits
        if fields.pop("magic") != MAGIC or code:
            return None
        codes.append(HandleCode(**fields))
    return codes


def _ruler(start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements `start` to `stop` of a storage where they belong to the ruler: `[stop - start]` on the CPU.

    Payloads are bits of a hash of the place, of 63 values at least, never 0.
    """
    box = _BOXES[dtype]
    place = torch.arange(start, stop, dtype=torch.int64, device="cpu")
    mixed = _hash(place)
    payload = mixed.remainder((1 << box.bits) - 1) + 1 + box.quiet_nan
    elements = torch.where(
        place % _NUMBER_EVERY == _NUMBER_EVERY - 1, _as_integers(_numbers(mixed >> 6), dtype), payload
    )
    return elements.to(box.integer).view(dtype)


def matches(copies: Sequence[torch.Tensor], session: int, batch: int, rows: Sequence[int]) -> bool:
    """Whether tensors are copies of a session's handles, token by token as they were issued, none left out.

    All elements are compared, which is as much work as to copy them.

    Args:
        copies: One per slot, `[len(rows), num_kv_heads, kv_len, head_dim]`; each may have lost its newest tokens.
        session: The number that the handles were issued with.
        batch: Their batch rows.
        rows: Which of these the copies have, in order.
    """
    dtype, device = copies[0].dtype, copies[0].device
    if any((copy.dtype, copy.device) != (dtype, device) for copy in copies):
        return False
    coded = _all_rows(session, [copy.shape[3] for copy in copies], batch, dtype)
    longest = max(copy.shape[2] + copy.shape[3] + HEAD_STRIDE * copy.shape[1] for copy in copies)
    storage = torch.cat([coded, _ruler(len(coded), len(coded) + longest, dtype)])
    storage = storage.view(_BOXES[dtype].integer).to(device)
    in_order = list(rows) == list(range(batch))
    index, offset, same = torch.tensor(rows, device=device), 0, []
    for copy in copies:
        _, heads, kv_len, dim = copy.shape
        issued = storage.as_strided((batch, heads, kv_len, dim), (dim, HEAD_STRIDE, 1, 1), offset)
        if not in_order:
            issued = issued.index_select(0, index)  # as large as the copy
        same.append((copy.detach().view(_BOXES[dtype].integer) == issued).all())
        offset += batch * dim
    return bool(torch.stack(same).all())


def first_row(tensor: torch.Tensor) -> torch.Tensor:
    """A handle's first elements, or another cache's: 1-D."""
    return tensor.detach()[(0,) * (tensor.dim() - 1)]


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins with a handle's elements, legible or not (its oldest tokens were cut off)."""
    box = _BOXES.get(tensor.dtype)
    if box is None or not 3 <= tensor.dim() <= MOST_DIMS or 0 in tensor.shape:
        return False
    row = first_row(tensor).cpu().contiguous()
    payload = row.view(box.integer).to(torch.int64) - box.quiet_nan
    return bool((row.isnan() & (payload > 0) & (payload < 1 << box.bits)).any())


def issue(
    session: int,
    heads_and_dims: Sequence[tuple[int, int]],
    batch: int,
    kv_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Make the handles of a session, all in one fresh storage.

    Args:
        session: The session's number, below `MAX_SESSION`.
        heads_and_dims: `(num_kv_heads, head_dim)` of each slot, in order.
        batch: Batch rows.
        kv_len: Tokens that the cache holds.
        dtype: The KV cache's dtype.
        device: The KV cache's device.

    Returns:
        One handle per slot, `[batch, num_kv_heads, kv_len, head_dim]`.
    """
    coded = _all_rows(session, [dim for _, dim in heads_and_dims], batch, dtype)
    storage = coded.to(device).untyped_storage()
    places, offset = [], 0
    for heads, dim in heads_and_dims:
        places.append((offset, (batch, heads, kv_len, dim)))
        offset += batch * dim
    return _look(storage, dtype, device, places)


def codes_of(handle: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` elements of a handle's storage, the rows of all slots, as integers; a view."""
    codes = torch.empty(0, dtype=handle.dtype, device=handle.device)
    return codes.set_(handle.untyped_storage(), 0, (count,), (1,)).view(_BOXES[handle.dtype].integer)


def resize(issued: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
    """The handles of a session for a cache of other lengths; they share the storage.

    Args:
        issued: One per slot.
        lengths: Tokens, likewise.
    """
    storage, dtype, device = issued[0].untyped_storage(), issued[0].dtype, issued[0].device
    places, offset = [], 0
    for handle, kv_len in zip(issued, lengths, strict=True):
        batch, heads, _, dim = handle.shape
        places.append((offset, (batch, heads, kv_len, dim)))
        offset += batch * dim
    resized = _look(storage, dtype, device, places)
    for handle in resized:
        # Dynamo would make the growing length static twice before it gives up; tell it at once.
        torch._dynamo.maybe_mark_dynamic(handle, 2)
    return resized


def were_written(handles: Sequence[torch.Tensor]) -> bool:
    """Whether somebody wrote into one of some handles, or into its base tensor: `_look` has counted to 1."""
    return max(map(_version_of, handles)) > 1


def _look(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    places: Sequence[tuple[int, tuple[int, int, int, int]]],
) -> list[torch.Tensor]:
    """Handles in `storage`, whose ruler grows as needed: in place, so that all its handles stay as they are.

    No views of another tensor: Dynamo traces a view with its base, whose size would be known to the graph.

    Args:
        storage: Of all of them.
        dtype: Theirs.
        device: Theirs.
        places: Offset and shape of each.
    """
    held = storage.nbytes() // dtype.itemsize
    needed, kv_len = 0, 0
    for offset, (batch, heads, tokens, dim) in places:
        needed = max(needed, offset + batch * dim + heads * dim + tokens)
        kv_len = max(kv_len, tokens)
    if held < needed:
        capacity = needed + max(_SLACK, kv_len // 2)
        storage.resize_(capacity * dtype.itemsize)
        tail = torch.empty(0, dtype=dtype, device=device).set_(storage, held, (capacity - held,), (1,))
        tail.copy_(_ruler(held, capacity, dtype))
    return [
        torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, (shape[3], HEAD_STRIDE, 1, 1))
        for offset, shape in places
    ]
