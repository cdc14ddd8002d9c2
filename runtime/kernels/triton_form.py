"""What Triton's decode kernels do to products before the softmax, and which queries a tile holds."""

from __future__ import annotations

import triton
import triton.language as tl


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
    batch_row,
    kv_head,
    lane,
    head,
    ok,
    batch,
    num_kv_heads,
    channel,
    channel_ok,
    NUM_GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    DOT: tl.constexpr,
):
    """Queries `[M, columns]` of one kv head, from `[lanes, batch, num_heads, 1, DIM]`."""
    at = (lane.to(tl.int64) * batch + batch_row) * (num_kv_heads * NUM_GROUPS) + kv_head * NUM_GROUPS + head
    where = at[:, None] * DIM + channel[None, :]
    return tl.load(query + where, mask=ok[:, None] & channel_ok[None, :], other=0).to(DOT)


@triton.jit
def told_lengths(num_quantized, window_len, lengths, TOLD: tl.constexpr):
    """Quantised tokens and rows of the window: as the launch says, or as the device's memory does (`DeviceSteps`)."""
    if TOLD:
        return tl.load(lengths), tl.load(lengths + 1)
    else:
        return num_quantized, window_len


@triton.jit
def formed_scores(
    products,
    position,
    position_ok,
    kv_len,
    lane,
    head,
    row_ok,
    batch_row,
    batch,
    scale,
    softcap,
    bias,
    bias_lane,
    bias_batch,
    bias_head,
    key_mask,
    mask_stride,
    visible,
    LANES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    INDEPENDENT: tl.constexpr,
):
    """Scale, cap, bias and hide: `products` `[M, N]` become scores, -inf where a query sees nothing.

    Args:
        products: Query times key.
        position: Columns of masks and biases, `[N]`: a stored token's number, or `kv_len` and a lane for its own pair.
        position_ok: Whether there is such a column.
        kv_len: Stored tokens.
        lane: See `query_rows`.
        head: Of the head within all query heads.
        row_ok: See `query_rows`.
        batch_row: Of the tile.
        batch: Batch rows.
        scale: Factor.
        softcap: See `DecodeInputs`.
        bias: See `LaneInputs`.
        bias_lane: Elements from lane to lane.
        bias_batch: From batch row to batch row.
        bias_head: From query head to query head.
        key_mask: uint8 `[batch, kv_len]`.
        mask_stride: Elements from one of its rows to the next.
        visible: uint8 `[lanes, batch, mask_stride + lanes]`.
        LANES: Lanes.
        HAS_SOFTCAP: Which of these there are.
        HAS_BIAS: As above.
        HAS_MASK: As above.
        HAS_VISIBLE: As above.
        INDEPENDENT: Each lane sees its own pair only.
    """
    scores = products * scale
    if HAS_SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
    seen = row_ok[:, None] & position_ok[None, :]
    if HAS_BIAS:
        at = lane[:, None].to(tl.int64) * bias_lane + head[:, None] * bias_head + position[None, :]
        scores += tl.load(bias + batch_row.to(tl.int64) * bias_batch + at, mask=seen, other=0).to(tl.float32)
    stored = position < kv_len
    if HAS_MASK:
        at = batch_row.to(tl.int64) * mask_stride + position
        real = tl.load(key_mask + at, mask=position_ok & stored, other=1)
        seen = seen & (real != 0)[None, :]
    if HAS_VISIBLE:
        # A row of bytes a lane takes fewer registers than a tile of them.
        for each in tl.static_range(LANES):
            row = (each * batch + batch_row).to(tl.int64) * (mask_stride + LANES)
            sees = tl.load(visible + row + position, mask=position_ok, other=0) != 0
            seen = seen & ((lane != each)[:, None] | sees[None, :])
    else:
        other = (position - kv_len)[None, :]
        if INDEPENDENT:
            seen = seen & (stored[None, :] | (other == lane[:, None]))
        else:
            seen = seen & (stored[None, :] | (other <= lane[:, None]))
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _staged_bits(first, start, indices, top_k, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """The bits, in a tile that begins at `start`, of the tokens that BLOCK_T slots hold."""
    slot = first + tl.arange(0, BLOCK_T)
    at = tl.load(indices + slot, mask=slot < top_k, other=-1) - start
    here = (at >= 0) & (at < BLOCK_N)
    bit = tl.full([BLOCK_T], 1, tl.int64) << tl.where(here, at, 0).to(tl.int64)
    return tl.sum(tl.where(here, bit, 0), 0)


@triton.jit
def without_staged(
    start, indices, top_k, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, ONE_PASS: tl.constexpr
):
    """Which tokens of `start` to `start + BLOCK_N` are not staged, bool `[BLOCK_N]`.

    One bit a token (BLOCK_N <= 64): tokens are staged once at most, so that adding bits is joining them. That takes a
    sum of BLOCK_T numbers a tile, where comparing all with all takes BLOCK_N times as many.
    """
    word = tl.zeros([1], tl.int64)
    if ONE_PASS:
        word += _staged_bits(0, start, indices, top_k, BLOCK_N, BLOCK_T)
    else:
        for first in range(0, top_k, BLOCK_T):
            word += _staged_bits(first, start, indices, top_k, BLOCK_N, BLOCK_T)
    return ((word >> tl.arange(0, BLOCK_N).to(tl.int64)) & 1) == 0
