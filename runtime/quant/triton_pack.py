"""Triton kernels that quantise and pack whole groups by KIVI's formulas, to the bit as `KiviQuantizer` does.

A program takes the groups that share a scale along one side of a tile and finds their least and greatest value. It
packs the codes of neighbouring channels into bytes: for each place in a byte it reads the channels that go there.

Paper: SpeCache §3.4, eq. 2 and 3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stored(x, KV: tl.constexpr):
    """float32 rounded to the KV dtype and back, half to even: in the interpreter too, whose bfloat16 rounds to zero."""
    if KV == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(KV).to(tl.float32)


@triton.jit
def _scale_and_zero(low, high, BITS: tl.constexpr, KV: tl.constexpr):
    """Of groups with these least and greatest values, as they are stored."""
    if BITS == 1:
        scale = 0.5 * high - 0.5 * low
        zero = tl.where(low == high, low, 0.75 * low + 0.25 * high)
    else:
        scale = tl.div_rn(high - low, tl.full(low.shape, 2**BITS - 1, tl.float32))
        zero = low
    # An infinite scale, of a span wider than the dtype reaches, would make code 0 a NaN.
    if KV == tl.float16:
        scale = tl.minimum(scale, 65504.0)
    elif KV == tl.bfloat16:
        scale = tl.minimum(scale, 3.3895313892515355e38)
    else:
        scale = tl.minimum(scale, 3.4028234663852886e38)
    return _stored(scale, KV), _stored(zero, KV)


@triton.jit
def _codes(x, scale, zero, BITS: tl.constexpr):
    """Codes of float32 `x`, int32; scale and zero in x's shape."""
    x = tl.div_rn(x - zero, tl.where(scale == 0, 1.0, scale))
    x = tl.minimum(tl.maximum(x, 0.0), 2**BITS - 1)
    # Beyond 2^23 float32 has no fractions: the sum rounds half to even. Clamping first gives the same codes.
    return (x + 8388608.0 - 8388608.0).to(tl.int32)


@triton.jit(do_not_specialize=["num_groups"])
def pack_keys(
    x,
    counted,
    codes,
    scale,
    zero,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    num_kv_heads,
    num_groups,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    COUNTED: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    KV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One group of GROUP tokens of one head, BLOCK bytes wide: a scale and a zero for each channel.

    `x` is `[batch, num_kv_heads, num_groups * GROUP, DIM]` of dtype KV, of any strides. `codes`, uint8 `[batch,
    num_kv_heads, num_groups * GROUP, ceil(DIM * BITS / 8)]`, and `scale` and `zero`, `[batch, num_kv_heads, num_groups,
    DIM]`, are contiguous. GROUP_PAD is a power of two, not below GROUP. Where COUNTED, only the tokens of `counted`
    (uint8 `[batch, num_groups * GROUP]`) make scales and zeros.
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = (DIM + PER_BYTE - 1) // PER_BYTE
    row = tl.program_id(0).to(tl.int64)  # batch row, head, group
    group = row % num_groups
    head = (row // num_groups) % num_kv_heads
    batch_row = row // (num_groups * num_kv_heads)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, GROUP_PAD)
    token_ok = place < GROUP
    counts = token_ok
    if COUNTED:
        tokens = counted + (batch_row * num_groups + group) * GROUP + place
        counts = tl.load(tokens, mask=token_ok, other=0) != 0
    rows = x + batch_row * stride_batch + head * stride_head + (group * GROUP + place) * stride_token
    packed = tl.zeros([GROUP_PAD, BLOCK], tl.int32)
    for at in tl.static_range(PER_BYTE):
        channel = byte * PER_BYTE + at
        channel_ok = channel < DIM
        ok = token_ok[:, None] & channel_ok[None, :]
        values = tl.load(rows[:, None] + channel[None, :] * stride_channel, mask=ok, other=0).to(tl.float32)
        low = tl.min(tl.where(counts[:, None], values, float("inf")), 0)
        high = tl.max(tl.where(counts[:, None], values, float("-inf")), 0)
        s, z = _scale_and_zero(low, high, BITS, KV)
        tl.store(scale + row * DIM + channel, s.to(KV), mask=channel_ok)
        tl.store(zero + row * DIM + channel, z.to(KV), mask=channel_ok)
        full = tl.zeros([GROUP_PAD, BLOCK], tl.float32)
        code = _codes(values, full + s[None, :], full + z[None, :], BITS)
        packed |= tl.where(ok, code, 0) << (at * BITS)
    to = codes + ((row * GROUP + place) * WIDTH)[:, None] + byte[None, :]
    tl.store(to, packed.to(tl.uint8), mask=token_ok[:, None] & (byte < WIDTH)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def pack_values(
    x,
    codes,
    scale,
    zero,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    num_kv_heads,
    tokens,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    KV: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """BLOCK tokens of one head, one group of GROUP channels: a scale and a zero for each token.

    `x` is `[batch, num_kv_heads, tokens, DIM]` of dtype KV, of any strides. `codes`, uint8 `[batch, num_kv_heads,
    tokens, ceil(DIM * BITS / 8)]`, and `scale` and `zero`, `[batch, num_kv_heads, tokens, ceil(DIM / GROUP)]`, are
    contiguous. A group is whole bytes of codes, or all channels. BYTES is a power of two, not below a group's bytes.
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = (DIM + PER_BYTE - 1) // PER_BYTE
    GROUP_BYTES: tl.constexpr = (GROUP + PER_BYTE - 1) // PER_BYTE
    NUM_GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    head_row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(2)
    token_ok = token < tokens
    start = (head_row // num_kv_heads) * stride_batch + (head_row % num_kv_heads) * stride_head
    rows = x + start + token.to(tl.int64) * stride_token
    inside = tl.arange(0, BYTES)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in tl.static_range(PER_BYTE):
        channel = group * GROUP + inside * PER_BYTE + at
        there = (inside * PER_BYTE + at < GROUP) & (channel < DIM)
        ok = token_ok[:, None] & there[None, :]
        values = tl.load(rows[:, None] + channel[None, :] * stride_channel, mask=ok, other=0).to(tl.float32)
        low = tl.minimum(low, tl.min(tl.where(there[None, :], values, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(there[None, :], values, float("-inf")), 1))
    s, z = _scale_and_zero(low, high, BITS, KV)
    row = head_row * tokens + token
    tl.store(scale + row * NUM_GROUPS + group, s.to(KV), mask=token_ok)
    tl.store(zero + row * NUM_GROUPS + group, z.to(KV), mask=token_ok)
    full = tl.zeros([BLOCK, BYTES], tl.float32)
    packed = tl.zeros([BLOCK, BYTES], tl.int32)
    for at in tl.static_range(PER_BYTE):
        channel = group * GROUP + inside * PER_BYTE + at
        there = (inside * PER_BYTE + at < GROUP) & (channel < DIM)
        ok = token_ok[:, None] & there[None, :]
        values = tl.load(rows[:, None] + channel[None, :] * stride_channel, mask=ok, other=0).to(tl.float32)
        code = _codes(values, full + s[:, None], full + z[:, None], BITS)
        packed |= tl.where(ok, code, 0) << (at * BITS)
    byte = group * GROUP_BYTES + inside
    written = token_ok[:, None] & ((inside < GROUP_BYTES) & (byte < WIDTH))[None, :]
    tl.store(codes + row[:, None] * WIDTH + byte[None, :], packed.to(tl.uint8), mask=written)
