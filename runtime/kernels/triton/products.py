"""Products of queries with codes of keys, scaled as scores are, for both of Triton's passes over the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from specache_fx.runtime.kernels.triton.tiles import channel_rows, code_tile, dequantised, least, step

_ROWS = tl.constexpr(16)  # of the smallest product


@triton.jit
def key_operands(
    planes,
    start,
    stop,
    opaque,
    of: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """The arguments of `key_products` for keys, from `planes`: codes, scale, and zero or mean.

    A tile; where keys are centred and a part lies in one group of tokens also each token's scale `[PARTS, BLOCK_N]` and
    the group's mean `[PARTS, columns]`.
    """
    GROUP: tl.constexpr = of[2]
    codes, scale, zero = planes
    x = code_tile(codes, start, stop, opaque, of, KV, DOT, BLOCK_N, False)
    if CENTRED and GROUP % BLOCK_N == 0:
        token = start[:, None] + tl.arange(0, BLOCK_N)[None, :]
        s = tl.load(scale + token, mask=token < stop, other=0).to(tl.float32)
        return x, s, channel_rows(zero, start // GROUP, start < stop, of, False).to(DOT)
    else:
        keys = dequantised(x, scale, zero, start, stop, of, KV, DOT, BLOCK_N, CENTRED, False)
        return keys, start, start


@triton.jit
def key_products(operands, q, scale, of: tl.constexpr, BLOCK_N: tl.constexpr, CENTRED: tl.constexpr):
    """float32 `[PARTS, BLOCK_N, M]`: `scale` times the keys times `q` `[PARTS, columns, M]`.

    Where keys are `s * (STEP * x - LEAST) + mean`, the scale s and LEAST meet the sums and not the channels.
    """
    BITS: tl.constexpr = of[0]
    UNIT: tl.constexpr = of[1]
    GROUP: tl.constexpr = of[2]
    keys, s, mean = operands
    if CENTRED and GROUP % BLOCK_N == 0:
        PARTS: tl.constexpr = q.shape[0]
        M: tl.constexpr = q.shape[2]
        mean = tl.broadcast_to(mean[:, None, :], [PARTS, _ROWS, q.shape[1]])
        of_mean = tl.dot(mean, q, input_precision="ieee") * scale
        of_mean = tl.broadcast_to(of_mean[:, None], [PARTS, BLOCK_N // _ROWS, _ROWS, M])
        offset = tl.sum(q.to(tl.float32), 1) * least(BITS, UNIT, True)
        products = tl.dot(keys, q, input_precision="ieee") * step(BITS, UNIT) - offset[:, None, :]
        return products * (s * scale)[:, :, None] + tl.reshape(of_mean, [PARTS, BLOCK_N, M])
    else:
        return tl.dot(keys, q, input_precision="ieee") * scale
