"""Shared parts of Triton's decode kernels: lengths, the queries of a tile, products before the softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def query_rows(tile, NUM_GROUPS: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr):
    """Of each row of a query tile: its lane, its head within the group, and whether there is such a query.

    All lanes and up to HEADS heads of a group share a tile of M rows, so that keys are read once for all of them.
    """
    row = tl.arange(0, M)
    lane = row // HEADS
    head = tile * HEADS + row % HEADS
    return lane, head, (lane < LANES) & (head < NUM_GROUPS)


@triton.jit
def query_tile(
    query,
    place,
    rows,
    channel,
    channel_ok,
    NUM_GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DOT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Queries of one kv head, from `[lanes, batch, num_heads, 1, DIM]`: `[PARTS, columns, M]`, alike for all parts.

    `place` is batch row, kv head, batch rows and kv heads; `rows` is what `query_rows` says.
    """
    batch_row, kv_head, batch, num_kv_heads = place
    lane, head, ok = rows
    at = (lane.to(tl.int64) * batch + batch_row) * (num_kv_heads * NUM_GROUPS) + kv_head * NUM_GROUPS + head
    where = at[None, :] * DIM + channel[:, None]
    q = tl.load(query + where, mask=ok[None, :] & channel_ok[:, None], other=0).to(DOT)
    return tl.broadcast_to(q[None], [PARTS, channel.shape[0], lane.shape[0]])


@triton.jit(do_not_specialize=["num_quantized", "window_len", "num_selectable"])
def tell_lengths(lengths, num_quantized, window_len, num_selectable):
    """Tell the device how long a cache is: no copy from the host, and nothing that waits.

    Write int32 `[3]`: tokens in codes, rows of the window, tokens that may be selected.
    """
    one = tl.arange(0, 1)
    tl.store(lengths + one, num_quantized)
    tl.store(lengths + 1 + one, window_len)
    tl.store(lengths + 2 + one, num_selectable)


@triton.jit
def lengths_of_step(num_quantized, window_len, lengths, LENGTHS_IN_MEMORY: tl.constexpr):
    """Quantised tokens and rows of the window: as the launch says, or as the device's memory does (`DeviceSteps`)."""
    if LENGTHS_IN_MEMORY:
        return tl.load(lengths), tl.load(lengths + 1)
    else:
        return num_quantized, window_len


@triton.jit
def code_stretch(split, code_tokens, num_quantized, GROUP: tl.constexpr):
    """The tokens of a stretch of codes, from and to.

    Divided and multiplied, so that the compiler knows of what both are multiples: loads of scales are of 4 bytes then,
    and may begin an iteration ahead.
    """
    code_tokens = code_tokens // 64 * 64
    begin = split * code_tokens
    stop = tl.minimum(begin + code_tokens, num_quantized)
    if GROUP % 16 == 0:
        stop = stop // 16 * 16
    return begin, stop


@triton.jit
def capped(scores, cap):
    """`cap * tanh(scores / cap)` without cancellation: see `capped` of vec.h."""
    # Triton takes a number above float32's largest for a float64.
    y = tl.abs(scores) * tl.minimum(2 * LOG2E / cap, 3.4028234663852886e38)
    y = tl.where(y > 60, 60.0, y)  # NaN stays
    n = tl.floor(y + 0.5)
    f = y - n
    z = f * 1.5403512e-4 + 1.3390735e-3
    z = z * f + 9.6182376e-3
    z = z * f + 5.5503573e-2
    z = z * f + 2.4022649e-1
    z = z * f + 6.9314718e-1
    power = tl.exp2(n)
    grown = z * f * power + (power - 1)
    size = grown / (grown + 2) * cap
    return tl.where(scores < 0, -size, size)


@triton.jit
def formed_scores(
    scores, position, position_ok, kv_len, place, rows, form, flags: tl.constexpr, ALL_STORED: tl.constexpr
):
    """Cap, bias and hide scaled products `[PARTS, N, M]`: -inf where a query sees nothing.

    Args:
        scores: Query times key, scaled. Of rows that are no query they mean nothing, here and in the result.
        position: Columns of masks and biases, `[PARTS, N]`: a stored token's number, or `kv_len` and a lane for its
            own pair.
        position_ok: Whether there is such a column.
        kv_len: Stored tokens.
        place: See `query_tile`.
        rows: See `query_rows`.
        form: `softcap, bias, bias_lane, bias_batch, bias_head, key_mask, mask_stride, visible`: see `DecodeInputs` and
            `LaneInputs` for the tensors. The bias has elements from lane to lane, from batch row to batch row and from
            query head to query head; `key_mask` is uint8 `[batch, mask_stride]`; `visible` is uint8
            `[lanes, batch, mask_stride + lanes]`.
        flags: `LANES, NUM_GROUPS, HAS_SOFTCAP, HAS_BIAS, HAS_MASK, HAS_VISIBLE, INDEPENDENT`: lanes, query heads of a
            kv head, which of these there are, and whether each lane sees its own pair only.
        ALL_STORED: All positions are stored tokens'.
    """
    softcap, bias, bias_lane, bias_batch, bias_head, key_mask, mask_stride, visible = form
    LANES: tl.constexpr = flags[0]
    NUM_GROUPS: tl.constexpr = flags[1]
    HAS_SOFTCAP: tl.constexpr = flags[2]
    HAS_BIAS: tl.constexpr = flags[3]
    HAS_MASK: tl.constexpr = flags[4]
    HAS_VISIBLE: tl.constexpr = flags[5]
    INDEPENDENT: tl.constexpr = flags[6]
    batch_row, kv_head, batch, _ = place
    lane, head, row_ok = rows
    if HAS_SOFTCAP:
        scores = capped(scores, softcap)
    seen = position_ok[:, :, None]
    if HAS_BIAS:
        query_head = kv_head * NUM_GROUPS + head
        row = lane.to(tl.int64) * bias_lane + query_head * bias_head + batch_row.to(tl.int64) * bias_batch
        ok = seen & row_ok[None, None, :]
        scores += tl.load(bias + row[None, None, :] + position[:, :, None], mask=ok, other=0).to(tl.float32)
    stored = position < kv_len
    if HAS_MASK:
        at = batch_row.to(tl.int64) * mask_stride + position
        real = tl.load(key_mask + at, mask=position_ok & stored, other=1)
        seen = seen & (real != 0)[:, :, None]
    if HAS_VISIBLE:
        # A row of bytes a lane takes fewer registers than a tile of them.
        for each in tl.static_range(LANES):
            row = (each * batch + batch_row).to(tl.int64) * (mask_stride + LANES)
            sees = tl.load(visible + row + position, mask=position_ok, other=0) != 0
            seen = seen & ((lane != each)[None, None, :] | sees[:, :, None])
    elif not ALL_STORED:
        other = (position - kv_len)[:, :, None]
        if INDEPENDENT:
            seen = seen & (stored[:, :, None] | (other == lane[None, None, :]))
        else:
            seen = seen & (stored[:, :, None] | (other <= lane[None, None, :]))
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _bits(slots, start, BLOCK_N: tl.constexpr):
    """The bits, in each part's words of 32 tokens from `start` on, of the tokens in `slots`: int32 `[PARTS, words]`."""
    WORD: tl.constexpr = min(BLOCK_N, 32)
    at = slots[None, None, :] - start[:, None, None] - WORD * tl.arange(0, BLOCK_N // WORD)[None, :, None]
    bit = tl.full(at.shape, 1, tl.int32) << (at & 31)
    return tl.sum(tl.where((at >= 0) & (at < WORD), bit, 0), 2)


@triton.jit
def first_slots(indices, top_k, BLOCK_T: tl.constexpr):
    """The tokens in the first BLOCK_T slots, -1 where there is none: for `without_staged`, read once."""
    slot = tl.arange(0, BLOCK_T)
    return tl.load(indices + slot, mask=slot < top_k, other=-1)


@triton.jit
def without_staged(
    start, stop, slots, indices, top_k, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, ONE_PASS: tl.constexpr
):
    """A mark for each part's tokens from `start` on that lie before `stop` and are not staged, bool `[PARTS, BLOCK_N]`.

    One bit a token: tokens are staged once at most, so that adding bits is joining them. That takes a sum of BLOCK_T
    numbers a word, where comparing all with all takes 32 times as many.
    """
    staged = _bits(slots, start, BLOCK_N)
    if not ONE_PASS:
        for first in range(BLOCK_T, top_k, BLOCK_T):
            slot = first + tl.arange(0, BLOCK_T)
            staged += _bits(tl.load(indices + slot, mask=slot < top_k, other=-1), start, BLOCK_N)
    place = tl.arange(0, min(BLOCK_N, 32))[None, None, :]
    gone = (staged[:, :, None] >> place) & 1
    gone = tl.reshape(gone, [start.shape[0], BLOCK_N])
    return (gone == 0) & (start[:, None] + tl.arange(0, BLOCK_N)[None, :] < stop)
