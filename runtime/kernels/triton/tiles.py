"""Tiles of packed keys and values as Triton's decode kernels read them.

A tile is of PARTS stretches of BLOCK_N tokens, one a warp, so that no warp waits for another: keys are
`[PARTS, BLOCK_N, columns]`, values `[PARTS, columns, BLOCK_N]`.

Codes are read as units: words of 32 bits where a row is whole words, else bytes. A word becomes the registers of a
product as it is, two numbers at a time: a shift brings two codes to the top of the mantissas of two 16-bit numbers,
and one LOP3 masks them and puts the exponents in. That gives `1 + code / 2**BITS`. What is left to do, `STEP` and
`LEAST`, commutes with the product.

The columns of a tile of codes are in an order of their own (`channels`). It makes the halves of a register of keys two
channels of one word, and those of values two tokens: no thread needs another one's words.

`of` tells what is the same for all codes of one side: `BITS, UNIT, GROUP, DIM, PAD`. BITS is the width of a code, UNIT
that of what is loaded, GROUP the tokens of a group, DIM the channels, PAD the columns of a tile.
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


@triton.constexpr_function
def step(bits: int, unit: int) -> float:
    """The worth of a unit of `code_tile`, in codes."""
    return 2.0**bits if unit == 32 else 1.0


@triton.constexpr_function
def least(bits: int, unit: int, centred: bool) -> float:
    """The offset of `code_tile * step`: codes count from their middle where they are centred."""
    return (2.0**bits if unit == 32 else 0.0) + ((2**bits - 1) / 2 if centred else 0.0)


@triton.jit
def along_tokens(x, OF_VALUES: tl.constexpr):
    """`[PARTS, BLOCK_N]` as it meets a tile."""
    return x[:, None, :] if OF_VALUES else x[:, :, None]


@triton.jit
def along_channels(x, OF_VALUES: tl.constexpr):
    """`[PARTS, columns]` as it meets a tile."""
    return x[:, :, None] if OF_VALUES else x[:, None, :]


@triton.jit
def _channel_grid(of: tl.constexpr, OF_VALUES: tl.constexpr):
    """The channel of each column, in three dimensions: neighbours along PLACES are neighbours in memory."""
    BITS: tl.constexpr = of[0]
    UNIT: tl.constexpr = of[1]
    PAD: tl.constexpr = of[4]
    PLACES: tl.constexpr = UNIT // 2 // BITS if UNIT == 32 else UNIT // BITS
    if UNIT == 32:
        WORDS: tl.constexpr = PAD // (2 * PLACES)
        if OF_VALUES:  # [2, PLACES, WORDS]
            half, place = tl.arange(0, 2)[:, None, None], tl.arange(0, PLACES)[None, :, None]
            word = tl.arange(0, WORDS)[None, None, :]
        else:  # [PLACES, WORDS, 2]
            place, word = tl.arange(0, PLACES)[:, None, None], tl.arange(0, WORDS)[None, :, None]
            half = tl.arange(0, 2)[None, None, :]
        return (word * 2 + half) * PLACES + place
    elif PLACES == 1:
        return tl.arange(0, PAD)[None, None, :]
    else:  # [1, PLACES, bytes]
        return tl.arange(0, PAD // PLACES)[None, None, :] * PLACES + tl.arange(0, PLACES)[None, :, None]


@triton.jit
def channels(of: tl.constexpr, OF_VALUES: tl.constexpr):
    """Of each column of a tile of codes: its channel, and whether there is such a channel."""
    DIM: tl.constexpr = of[3]
    PAD: tl.constexpr = of[4]
    channel = tl.reshape(_channel_grid(of, OF_VALUES), [PAD])
    return channel, channel < DIM


@triton.jit
def channel_rows(plane, at, ok, of: tl.constexpr, OF_VALUES: tl.constexpr):
    """A number a channel, from each part's row `at`: `[PARTS, columns]`; 0 where there is none."""
    DIM: tl.constexpr = of[3]
    PAD: tl.constexpr = of[4]
    grid = _channel_grid(of, OF_VALUES)[None]
    ok = ok[:, None, None, None]
    if (
        DIM != PAD
    ):  # not by a mask that is always true: the compiler can't see through it, and would load one by one
        ok = ok & (grid < DIM)
    numbers = tl.load(plane + (at * DIM)[:, None, None, None] + grid, mask=ok, other=0)
    return tl.reshape(numbers, [at.shape[0], PAD])


@triton.jit
def _pairs(words, place, opaque, BITS: tl.constexpr, KV: tl.constexpr, DOT: tl.constexpr):
    """Of each word the codes at `place` of both halves, as `1 + code / 2**BITS`, low half first.

    `opaque` is 0, which the compiler can't know: a constant mask would be written to a register for each use.
    """
    MANTISSA: tl.constexpr = 7 if KV == tl.bfloat16 else 10
    MASK: tl.constexpr = ((1 << BITS) - 1) << (MANTISSA - BITS)
    ONE: tl.constexpr = 0x3F80 if KV == tl.bfloat16 else 0x3C00
    by = place * BITS - (MANTISSA - BITS)
    moved = tl.where(by >= 0, words >> tl.maximum(by, 0), words << tl.maximum(-by, 0))
    pair = (moved & (MASK * 0x10001 + opaque)) | (ONE * 0x10001)
    return _number(pair, KV, DOT), _number(pair >> 16, KV, DOT)


@triton.jit
def _number(bits, KV: tl.constexpr, DOT: tl.constexpr):
    """The KV dtype's number of the low half's bits, as an operand of `tl.dot`; see `rounded`."""
    if KV == tl.bfloat16 and DOT == tl.float32:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(KV, bitcast=True).to(DOT)


@triton.jit
def code_rows(codes, row, stride, of: tl.constexpr):
    """The address at which the codes of the head `row` begin: heads are whole rows apart, which makes loads wide."""
    BITS: tl.constexpr = of[0]
    UNIT: tl.constexpr = of[1]
    DIM: tl.constexpr = of[3]
    UNITS: tl.constexpr = (DIM * BITS + UNIT - 1) // UNIT
    if UNITS % 4 == 0:
        stride = stride // 4 * 4
    return codes + row * stride


@triton.jit
def code_tile(
    codes,
    start,
    stop,
    opaque,
    of: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    """Codes of the tokens from each part's `start` on, before `stop`: `(code + LEAST) / STEP`, of dtype DOT.

    Columns that are no channels, and tokens that are not there, have any number.
    """
    BITS: tl.constexpr = of[0]
    UNIT: tl.constexpr = of[1]
    DIM: tl.constexpr = of[3]
    PAD: tl.constexpr = of[4]
    PARTS: tl.constexpr = start.shape[0]
    PLACES: tl.constexpr = UNIT // 2 // BITS if UNIT == 32 else UNIT // BITS
    UNITS: tl.constexpr = PAD * BITS // UNIT
    STRIDE: tl.constexpr = (DIM * BITS + UNIT - 1) // UNIT
    unit = tl.arange(0, UNITS)
    if UNIT == 32 and OF_VALUES:
        even = (start[:, None] + 2 * tl.arange(0, BLOCK_N // 2)[None, :])[:, None, :]
        ok, odd_ok = even < stop, even + 1 < stop
        if UNITS != STRIDE:
            ok, odd_ok = ok & (unit < STRIDE)[None, :, None], odd_ok & (unit < STRIDE)[None, :, None]
        at = codes + even * STRIDE + unit[None, :, None]
        first = tl.load(at, mask=ok, other=0)
        second = tl.load(at + STRIDE, mask=odd_ok, other=0)
        low = (first & 0xFFFF) | (second << 16)
        high = ((first >> 16) & 0xFFFF) | (second & -65536)
        half = tl.arange(0, 2)[None, :, None, None]
        words = tl.where(half == 0, low[:, None], high[:, None])[
            :, :, None
        ]  # [PARTS, 2, 1, UNITS, BLOCK_N / 2]
        place = tl.arange(0, PLACES)[None, None, :, None, None]
        even, odd = _pairs(words, place, opaque, BITS, KV, DOT)
        x = tl.reshape(tl.join(even, odd), [PARTS, PAD, BLOCK_N])
    else:
        token = start[:, None] + tl.arange(0, BLOCK_N)[None, :]
        ok = along_tokens(token < stop, OF_VALUES)
        if UNITS != STRIDE:
            ok = ok & along_channels((unit < STRIDE)[None, :], OF_VALUES)
        at = along_tokens(token * STRIDE, OF_VALUES) + along_channels(unit[None, :], OF_VALUES)
        packed = tl.load(codes + at, mask=ok, other=0).to(tl.int32)
        if UNIT == 32:
            low, high = _pairs(
                packed[:, :, None], tl.arange(0, PLACES)[None, None, :, None], opaque, BITS, KV, DOT
            )
            x = tl.reshape(tl.join(low, high), [PARTS, BLOCK_N, PAD])
        elif OF_VALUES:
            each = (packed[:, None] >> (BITS * tl.arange(0, PLACES)[None, :, None, None])) & (2**BITS - 1)
            x = tl.reshape(each, [PARTS, PAD, BLOCK_N]).to(tl.float32).to(DOT)
        else:
            each = (packed[:, :, None] >> (BITS * tl.arange(0, PLACES)[None, None, :, None])) & (2**BITS - 1)
            x = tl.reshape(each, [PARTS, BLOCK_N, PAD]).to(tl.float32).to(DOT)
    return x


@triton.jit
def dequantised(
    x,
    scale,
    zero,
    start,
    stop,
    of: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CENTRED: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    """`code_tile`'s numbers, scaled and rounded to the KV dtype, as the reference kernel sees them.

    KIVI's keys have a scale and a zero for each channel and group of tokens, its values for each token and group of
    channels. CENTRED: a scale for each token, a mean for each channel and group of tokens.
    """
    BITS: tl.constexpr = of[0]
    UNIT: tl.constexpr = of[1]
    if CENTRED:
        token = start[:, None] + tl.arange(0, BLOCK_N)[None, :]
        s = along_tokens(tl.load(scale + token, mask=token < stop, other=0), OF_VALUES)
        z = _by_group(zero, start, stop, of, BLOCK_N, OF_VALUES)
    elif not OF_VALUES:
        s = _by_group(scale, start, stop, of, BLOCK_N, OF_VALUES)
        z = _by_group(zero, start, stop, of, BLOCK_N, OF_VALUES)
    else:
        s = _by_channel_group(scale, start, stop, of, BLOCK_N)
        z = _by_channel_group(zero, start, stop, of, BLOCK_N)
    if DOT == tl.float32:
        codes = x.to(tl.float32) * step(BITS, UNIT) - least(BITS, UNIT, CENTRED)
        return rounded(codes * s.to(tl.float32) + z.to(tl.float32), KV, DOT)
    else:  # two numbers an instruction; codes are exact in 16 bits, so that this is rounded once
        codes = (x * step(BITS, UNIT) - least(BITS, UNIT, CENTRED)).to(KV)
        return tl.fma(codes, tl.broadcast_to(s, x.shape), tl.broadcast_to(z, x.shape))


@triton.jit
def _by_group(plane, start, stop, of: tl.constexpr, BLOCK_N: tl.constexpr, OF_VALUES: tl.constexpr):
    """Numbers of a channel and group of tokens, as they meet a tile."""
    GROUP: tl.constexpr = of[2]
    DIM: tl.constexpr = of[3]
    if GROUP % BLOCK_N == 0:  # a part begins at a multiple of BLOCK_N, and lies within a group
        row = channel_rows(plane, start // GROUP, start < stop, of, OF_VALUES)
        return along_channels(row, OF_VALUES)
    else:
        channel, channel_ok = channels(of, OF_VALUES)
        token = start[:, None] + tl.arange(0, BLOCK_N)[None, :]
        at = along_tokens(token // GROUP * DIM, OF_VALUES) + along_channels(channel[None, :], OF_VALUES)
        ok = along_tokens(token < stop, OF_VALUES) & along_channels(channel_ok[None, :], OF_VALUES)
        return tl.load(plane + at, mask=ok, other=0)


@triton.jit
def _by_channel_group(plane, start, stop, of: tl.constexpr, BLOCK_N: tl.constexpr):
    """Numbers of a token and group of channels, `[PARTS, columns, BLOCK_N]`."""
    BITS: tl.constexpr = of[0]
    UNIT: tl.constexpr = of[1]
    GROUP: tl.constexpr = of[2]
    DIM: tl.constexpr = of[3]
    PAD: tl.constexpr = of[4]
    PARTS: tl.constexpr = start.shape[0]
    WIDTH: tl.constexpr = GROUP if GROUP < DIM else DIM
    NUM_GROUPS: tl.constexpr = (DIM + WIDTH - 1) // WIDTH
    CHANNELS: tl.constexpr = UNIT // BITS
    if UNIT == 32 and WIDTH % CHANNELS == 0:  # all channels of a word are of one group
        WORDS: tl.constexpr = PAD // CHANNELS
        even = (start[:, None] + 2 * tl.arange(0, BLOCK_N // 2)[None, :])[:, None, :]
        word = tl.arange(0, WORDS)[None, :, None]
        at = plane + even * NUM_GROUPS + word * CHANNELS // WIDTH
        there = word * CHANNELS < DIM
        pair = tl.join(
            tl.load(at, mask=there & (even < stop), other=0),
            tl.load(at + NUM_GROUPS, mask=there & (even + 1 < stop), other=0),
        )
        pair = tl.broadcast_to(pair[:, None], [PARTS, CHANNELS, WORDS, BLOCK_N // 2, 2])
        return tl.reshape(pair, [PARTS, PAD, BLOCK_N])
    else:
        channel, channel_ok = channels(of, True)
        token = (start[:, None] + tl.arange(0, BLOCK_N)[None, :])[:, None, :]
        at = token * NUM_GROUPS + (channel // WIDTH)[None, :, None]
        return tl.load(plane + at, mask=(token < stop) & channel_ok[None, :, None], other=0)
