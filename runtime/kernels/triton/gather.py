"""Triton kernels that bring chosen rows from page-locked host memory to their slots: no index leaves the device.

`plan_slots` gives every wanted token the slot that it has, or a free one, as `runtime.transfer.plan_slots` does on the
CPU. `copy_rows` reads the missing rows at their host addresses and writes them into their slots. A GPU can do so where
the memory is page-locked (unified addressing).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.native.launches import launch

_TILE_WORDS = 1024
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def launch_copy(
    rows: torch.Tensor, staged: torch.Tensor, missing: torch.Tensor, source: torch.Tensor, table: torch.Tensor
) -> None:
    """Launch `copy_rows`.

    Args:
        rows: The slots, `[batch, num_kv_heads, top_k, key_dim + value_dim]` of the KV dtype.
        staged: The token in each, int32 `[batch, num_kv_heads, top_k]`.
        missing: Tokens that come, likewise.
        source: Of each slot its place in `missing`, or -1; likewise.
        table: `HostCache.table`, on the device.
    """
    batch, heads, top_k, row_dim = rows.shape
    row_bytes = row_dim * rows.element_size()
    # The widest integer that a row is a whole number of.
    words = rows.view(next(dtype for size, dtype in _WORDS.items() if row_bytes % size == 0))
    padded = triton_ops.power_of_two(words.shape[3])
    slots = max(min(_TILE_WORDS // padded, triton_ops.power_of_two(top_k)), 1)
    launch(
        copy_rows,
        (batch * heads, -(-top_k // slots)),
        rows=words,
        staged=staged,
        missing=missing,
        source=source,
        table=table,
        top_k=top_k,
        WORDS=words.shape[3],
        WORDS_PAD=padded,
        SLOTS=slots,
    )


@triton.jit
def _is_among(own, others, count, BLOCK: tl.constexpr):
    """A mark for each of `own` `[BLOCK]`, not below 0, that is among the `count` numbers at `others`."""
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        other = tl.load(others + at, mask=at < count, other=-1)
        found += tl.sum((own[:, None] == other[None, :]).to(tl.int32), 1)
    return (found > 0) & (own >= 0)


@triton.jit(do_not_specialize=["top_k", "length"])
def plan_slots(
    staged,
    wanted,
    missing,
    source,
    counters,
    lengths,
    length,
    top_k,
    LENGTHS_IN_MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Plan one row: which tokens come, and which slot takes which of them. All but two are int32 `[rows, top_k]`.

    `staged` is the token in each slot, -1 where it is empty; `wanted` the tokens to hold, unique in a row, -1 for none.
    Written: `missing`, the wanted tokens that are not staged, in wanted's order, then -1; and `source`, for each slot
    its place in `missing`, -1 where its token stays. `counters`, int64 `[3]`, are added to: rows that come, rows that
    stay, tokens that the host does not hold. It holds `length` tokens; where
    LENGTHS_IN_MEMORY, as many as `lengths` says, int32.
    """
    if LENGTHS_IN_MEMORY:
        length = tl.load(lengths)
    row = tl.program_id(0).to(tl.int64) * top_k
    come = tl.zeros([1], tl.int32)
    stay = tl.zeros([1], tl.int32)
    wrong = tl.zeros([1], tl.int32)
    for first in range(0, top_k, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(wanted + row + at, mask=at < top_k, other=-1)
        beyond = token >= length
        wrong += tl.sum(beyond.to(tl.int32), 0)
        token = tl.where(beyond, -1, token)
        held = _is_among(token, staged + row, top_k, BLOCK)
        comes = ((token >= 0) & ~held).to(tl.int32)
        place = come + tl.cumsum(comes, 0) - comes
        tl.store(missing + row + place, token, mask=comes > 0)
        come += tl.sum(comes, 0)
        stay += tl.sum(held.to(tl.int32), 0)
    free = tl.zeros([1], tl.int32)
    for first in range(0, top_k, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(missing + row + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= come) & (at < top_k))
        token = tl.load(staged + row + at, mask=at < top_k, other=-1)
        is_free = ((at < top_k) & ~_is_among(token, wanted + row, top_k, BLOCK)).to(tl.int32)
        place = free + tl.cumsum(is_free, 0) - is_free
        tl.store(source + row + at, tl.where(is_free > 0, place, -1), mask=at < top_k)
        free += tl.sum(is_free, 0)
    one = tl.arange(0, 1)
    tl.atomic_add(counters + one, come.to(tl.int64))
    tl.atomic_add(counters + 1 + one, stay.to(tl.int64))
    tl.atomic_add(counters + 2 + one, wrong.to(tl.int64))


@triton.jit(do_not_specialize=["top_k"])
def copy_rows(
    rows,
    staged,
    missing,
    source,
    table,
    top_k,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Fill SLOTS slots of one row, where their token does not stay; `missing` and `source` are those of `plan_slots`.

    Written: `rows`, `[rows, top_k, WORDS]`, the slots as integers as wide as a row's bytes allow; and `staged`, int32
    `[rows, top_k]`, the token in each. `table` is `HostCache.table`: how many blocks the host has; the first token and
    the address of each, `[rows, tokens of the block, WORDS]`; one behind the last token. WORDS_PAD is a power of two,
    not below WORDS.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    ok = slot < top_k
    place = tl.load(source + row * top_k + slot, mask=ok, other=-1)
    changes = ok & (place >= 0)
    token = tl.load(missing + row * top_k + place, mask=changes, other=-1)
    tl.store(staged + row * top_k + slot, token, mask=changes)
    comes = changes & (token >= 0)
    starts = table + 1
    block = tl.zeros([SLOTS], tl.int32)
    for number in range(1, tl.load(table).to(tl.int32)):
        block += (token >= tl.load(starts + 2 * number)).to(tl.int32)
    at = starts + 2 * block
    first = tl.load(at, mask=comes, other=0)
    tokens = tl.load(at + 2, mask=comes, other=0) - first
    base = tl.load(at + 1, mask=comes, other=0).to(tl.pointer_type(rows.dtype.element_ty))
    word = tl.arange(0, WORDS_PAD)
    ok = comes[:, None] & (word < WORDS)[None, :]
    origin = base + (row * tokens + token - first) * WORDS
    values = tl.load(origin[:, None] + word[None, :], mask=ok, other=0)
    tl.store(rows + ((row * top_k + slot) * WORDS)[:, None] + word[None, :], values, mask=ok)
