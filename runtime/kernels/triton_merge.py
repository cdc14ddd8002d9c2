"""Triton kernel that puts the parts of split-KV attention together."""

from __future__ import annotations

import triton
import triton.language as tl

from specache_fx.runtime.kernels.triton_tiles import rounded


@triton.jit(do_not_specialize=["splits", "code_splits"])
def merge_parts(
    out,
    code_out,
    norm,
    part_max,
    part_sum,
    part_out,
    sinks,
    batch,
    num_heads,
    splits,
    code_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    LANES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CENTRED: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One query's output, and what normalises its scores; a program each.

    Args:
        out: `[lanes, batch, num_heads, 1, VALUE_DIM]` of the query's dtype; 0 where a query sees nothing.
        code_out: The codes' share of it where they are centred, float32 of that shape and still rotated; `out` is
            float32 then too, and the rest.
        norm: float32 `[batch, lanes, num_heads]`: the logarithm of the sum of exp(score), the sink's included.
        part_max: See `triton_decode`.
        part_sum: Likewise.
        part_out: Likewise.
        sinks: `[num_heads]`.
        batch: Batch rows.
        num_heads: Query heads.
        splits: Parts.
        code_splits: How many of them are of codes, the first ones.
        VALUE_DIM: Channels.
        VALUE_PAD: Channels of a tile.
        LANES: Lanes.
        HAS_SINKS: Whether there are sinks.
        CENTRED: See `code_out`.
        KV: dtype of out.
        DOT: See `rounded`.
        BLOCK_S: Parts read at once.
    """
    query = tl.program_id(0).to(tl.int64)  # counted over [batch, lanes, num_heads]
    head = query % num_heads
    lane = (query // num_heads) % LANES
    batch_row = query // (num_heads * LANES)
    channel = tl.arange(0, VALUE_PAD)
    channel_ok = channel < VALUE_DIM
    greatest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([VALUE_PAD], tl.float32)
    of_codes = tl.zeros([VALUE_PAD], tl.float32)
    for first in range(0, splits, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        ok = part < splits
        at = query * splits + part
        maxima = tl.load(part_max + at, mask=ok, other=float("-inf"))
        new = tl.maximum(greatest, tl.max(maxima, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(maxima - shift)
        before = tl.exp(greatest - shift)
        total = total * before + tl.sum(weights * tl.load(part_sum + at, mask=ok, other=0), 0)
        outs = tl.load(
            part_out + at[:, None] * VALUE_DIM + channel[None, :],
            mask=ok[:, None] & channel_ok[None, :],
            other=0,
        )
        if CENTRED:
            is_code = part < code_splits
            of_codes = of_codes * before + tl.sum(tl.where(is_code, weights, 0.0)[:, None] * outs, 0)
            weights = tl.where(is_code, 0.0, weights)
        acc = acc * before + tl.sum(weights[:, None] * outs, 0)
        greatest = new
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        new = tl.maximum(greatest, sink)
        shift = tl.where(new == float("-inf"), 0.0, new)
        before = tl.exp(greatest - shift)
        total = total * before + tl.exp(sink - shift)
        acc = acc * before
        of_codes = of_codes * before
        greatest = new
    acc = acc / tl.where(total > 0, total, 1.0)
    to = ((lane * batch + batch_row) * num_heads + head) * VALUE_DIM + channel
    if CENTRED:
        tl.store(out + to, acc, mask=channel_ok)
        tl.store(code_out + to, of_codes / tl.where(total > 0, total, 1.0), mask=channel_ok)
    else:
        tl.store(out + to, rounded(acc, KV, DOT).to(KV), mask=channel_ok)
    one = tl.arange(0, 1)
    logarithm = tl.where(total > 0, greatest + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(norm + query + one, logarithm)
