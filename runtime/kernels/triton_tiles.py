"""Tiles of keys and values as Triton's decode kernels read them: packed codes, and 16-bit rows.

The channels of a tile are in an order of their own. Byte w of a packed row holds the channels w * P to w * P + P - 1
(P = 8 / bits). Column i of a tile is place i // W of byte i % W, W being the bytes of a row: columns side by side read
bytes side by side, so that loads are wide, and no tile has to be interleaved. Scores sum over channels and don't mind;
queries and outputs are read and written in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, KV: tl.constexpr, DOT: tl.constexpr):
    """float32 `x`, rounded to the KV dtype, as an operand of `tl.dot`.

    The two dtypes differ in the interpreter alone, whose bfloat16 rounds towards zero and can't be multiplied: there
    the low half of a float32 is rounded away.
    """
    if KV == tl.bfloat16 and DOT == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(KV).to(DOT)


@triton.jit
def channels(BITS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Of each column of a tile: its channel, its byte, its shift, and whether there is such a channel."""
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = DIM_PAD // PER_BYTE
    column = tl.arange(0, DIM_PAD)
    byte = column % BYTES
    place = column // BYTES
    # Apart: the compiler does not see that `byte * 1 + place` counts up by ones, and loads channels one by one.
    channel = column if PER_BYTE == 1 else byte * PER_BYTE + place
    # Known to the compiler where all are there: a mask that it can't see through would make loads narrow.
    ok = tl.full([DIM_PAD], 1, tl.int1) if DIM == DIM_PAD else channel < DIM
    return channel, byte, place * BITS, ok


@triton.jit
def unpacked(codes, token, token_ok, byte, shift, channel_ok, BITS: tl.constexpr, DIM: tl.constexpr):
    """The codes of some tokens as float32 `[tokens, columns]`; 0 where there is none."""
    WIDTH: tl.constexpr = (DIM * BITS + 7) // 8
    where = token[:, None].to(tl.int64) * WIDTH + byte[None, :]
    packed = tl.load(codes + where, mask=token_ok[:, None] & channel_ok[None, :], other=0).to(tl.int32)
    return ((packed >> shift[None, :]) & (2**BITS - 1)).to(tl.float32)


@triton.jit
def centred_tile(
    codes,
    scale,
    mean,
    start,
    token_ok,
    channel,
    byte,
    shift,
    channel_ok,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
):
    """Keys or values of `TurboQuantizer`'s codes, still rotated: a scale a token, a mean a channel and group."""
    token = start + tl.arange(0, BLOCK_N)
    x = unpacked(codes, token, token_ok, byte, shift, channel_ok, BITS, DIM) - (2**BITS - 1) / 2
    s = tl.load(scale + token, mask=token_ok, other=0).to(tl.float32)[:, None]
    if GROUP % BLOCK_N == 0:
        at = (start // GROUP) * DIM + channel
        m = tl.load(mean + at, mask=channel_ok, other=0).to(tl.float32)[None, :]
    else:
        at = (token // GROUP)[:, None].to(tl.int64) * DIM + channel[None, :]
        m = tl.load(mean + at, mask=token_ok[:, None] & channel_ok[None, :], other=0).to(tl.float32)
    return rounded(x * s + m, KV, DOT)


@triton.jit
def key_tile(
    codes,
    scale,
    zero,
    start,
    token_ok,
    channel,
    byte,
    shift,
    channel_ok,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Dequantised keys of the tokens from `start` on, `[BLOCK_N, columns]`: one scale a channel and group of tokens.

    CENTRED: see `centred_tile`.
    """
    if CENTRED:
        return centred_tile(
            codes,
            scale,
            zero,
            start,
            token_ok,
            channel,
            byte,
            shift,
            channel_ok,
            BITS,
            GROUP,
            DIM,
            BLOCK_N,
            KV,
            DOT,
        )
    token = start + tl.arange(0, BLOCK_N)
    x = unpacked(codes, token, token_ok, byte, shift, channel_ok, BITS, DIM)
    if GROUP % BLOCK_N == 0:
        # `start` is a multiple of BLOCK_N, so the tile lies within one group.
        at = (start // GROUP) * DIM + channel
        s = tl.load(scale + at, mask=channel_ok, other=0).to(tl.float32)[None, :]
        z = tl.load(zero + at, mask=channel_ok, other=0).to(tl.float32)[None, :]
    else:
        at = (token // GROUP)[:, None].to(tl.int64) * DIM + channel[None, :]
        ok = token_ok[:, None] & channel_ok[None, :]
        s = tl.load(scale + at, mask=ok, other=0).to(tl.float32)
        z = tl.load(zero + at, mask=ok, other=0).to(tl.float32)
    return rounded(x * s + z, KV, DOT)


@triton.jit
def value_tile(
    codes,
    scale,
    zero,
    start,
    token_ok,
    channel,
    byte,
    shift,
    channel_ok,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Dequantised values, as `key_tile`: one scale a token and group of channels."""
    if CENTRED:
        return centred_tile(
            codes,
            scale,
            zero,
            start,
            token_ok,
            channel,
            byte,
            shift,
            channel_ok,
            BITS,
            GROUP,
            DIM,
            BLOCK_N,
            KV,
            DOT,
        )
    WIDTH: tl.constexpr = GROUP if GROUP < DIM else DIM
    NUM_GROUPS: tl.constexpr = (DIM + WIDTH - 1) // WIDTH
    token = start + tl.arange(0, BLOCK_N)
    x = unpacked(codes, token, token_ok, byte, shift, channel_ok, BITS, DIM)
    at = token.to(tl.int64) * NUM_GROUPS
    if NUM_GROUPS <= 4:
        # A load a group and token, and a choice a channel: a load a channel would be most of all loads.
        s = tl.load(scale + at, mask=token_ok, other=0).to(tl.float32)[:, None]
        z = tl.load(zero + at, mask=token_ok, other=0).to(tl.float32)[:, None]
        for group in tl.static_range(1, NUM_GROUPS):
            own = (channel // WIDTH == group)[None, :]
            s = tl.where(own, tl.load(scale + at + group, mask=token_ok, other=0).to(tl.float32)[:, None], s)
            z = tl.where(own, tl.load(zero + at + group, mask=token_ok, other=0).to(tl.float32)[:, None], z)
    else:
        where = at[:, None] + (channel // WIDTH)[None, :]
        ok = token_ok[:, None] & channel_ok[None, :]
        s = tl.load(scale + where, mask=ok, other=0).to(tl.float32)
        z = tl.load(zero + where, mask=ok, other=0).to(tl.float32)
    return rounded(x * s + z, KV, DOT)


@triton.jit
def row_tile(
    staged,
    window,
    own,
    row,
    top_k,
    window_len,
    own_stride,
    channel,
    channel_ok,
    staged_offset: tl.constexpr,
    ROW: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    DOT: tl.constexpr,
):
    """16-bit rows, `[rows, columns]`: the staged ones, then the window's, then each lane's own.

    Args:
        staged: Rows of ROW elements, of which this tile reads DIM from `staged_offset` on.
        window: Rows of DIM elements.
        own: The lanes' own, `own_stride` elements from lane to lane.
        row: Numbers of the rows, counted over all three.
        top_k: Staged rows.
        window_len: The window's.
        own_stride: See `own`.
        channel: See `channels`.
        channel_ok: See `channels`.
        staged_offset: See `staged`.
        ROW: See `staged`.
        DIM: Channels.
        LANES: How many own rows there are.
        DOT: dtype of the tile.
    """
    at = row.to(tl.int64)
    in_window = at - top_k
    lane = in_window - window_len
    # One load from where the row lies: a load for each of the three places takes three times the registers.
    begin = tl.where(
        at < top_k,
        staged + at * ROW + staged_offset,
        tl.where(lane < 0, window + in_window * DIM, own + lane * own_stride),
    )
    ok = (lane < LANES)[:, None] & channel_ok[None, :]
    return tl.load(begin[:, None] + channel[None, :], mask=ok, other=0).to(DOT)
