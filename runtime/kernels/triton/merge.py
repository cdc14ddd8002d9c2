"""Triton kernels around split-KV attention: queries in the basis of centred codes, and the parts put together.

In a whole step (`DeviceSteps`) the second also appends the own pairs, and keeps the selection's later inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_fx.runtime.kernels.triton.tiles import rounded


@triton.jit
def turned(x, matrix, column, row, row_ok, DIM: tl.constexpr):
    """Columns `column` of `x @ matrix`: `x` `[rows]`, `matrix` float32 `[DIM, DIM]`."""
    ok = row_ok[:, None] & (column < DIM)[None, :]
    part = tl.load(matrix + row[:, None] * DIM + column[None, :], mask=ok, other=0)
    return tl.sum(x[:, None] * part, 0)


@triton.jit
def rotate_queries(
    out,
    query,
    balance,
    turn,
    num_heads,
    num_kv_heads,
    batch,
    NUM_GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One query in the basis of centred codes: balanced, rotated and divided by `block_size`; a program each.

    `query` is `[lanes, batch, num_heads, 1, KEY_DIM]`, `out` the same in float32. `balance` is that of the codes of
    keys (`TurboQuantizer`), `turn` the first result of `quant.hadamard.rotation`. KEY_CHANNELS is a power of two, not
    below KEY_DIM; BLOCK_C of them are made at a time.
    """
    number = tl.program_id(0).to(tl.int64)  # counted over [lanes, batch, num_heads]
    kv_head = (number % num_heads) // NUM_GROUPS
    batch_row = (number // num_heads) % batch
    row = tl.arange(0, KEY_CHANNELS)
    ok = row < KEY_DIM
    x = tl.load(query + number * KEY_DIM + row, mask=ok, other=0).to(tl.float32)
    x *= tl.load(balance + (batch_row * num_kv_heads + kv_head) * KEY_DIM + row, mask=ok, other=0).to(
        tl.float32
    )
    for first in range(0, KEY_CHANNELS, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        tl.store(
            out + number * KEY_DIM + column, turned(x, turn, column, row, ok, KEY_DIM), mask=column < KEY_DIM
        )


@triton.jit
def _copy_row(to, origin, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    at = tl.arange(0, DIM_PAD)
    tl.store(to + at, tl.load(origin + at, mask=at < DIM, other=0), mask=at < DIM)


@triton.jit(do_not_specialize=["splits", "code_splits"])
def merge_parts(
    out,
    norm,
    part_max,
    part_sum,
    part_out,
    sinks,
    turn_back,
    kept_query,
    kept_key,
    query,
    own_key,
    own_value,
    window_key,
    window_value,
    window_key_stride,
    window_value_stride,
    lengths,
    batch,
    num_heads,
    splits,
    code_splits,
    KEY_DIM: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CENTRED: tl.constexpr,
    KEEPS: tl.constexpr,
    WRITTEN: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One query's output, and the normaliser of its scores; a program each.

    Read:
        part_max, part_sum, part_out: `splits` parts of `partial_attention`; the first `code_splits` are of codes.
        turn_back: float32 `[VALUE_DIM, VALUE_DIM]`: turns sums of codes back, where these are CENTRED.
        sinks: `[num_heads]`, where it HAS_SINKS.
        query, own_key: `[lanes, batch, num_heads, 1, KEY_DIM]` and `[lanes, batch, num_kv_heads, 1, KEY_DIM]`.
        own_value: `[lanes, batch, num_kv_heads, 1, VALUE_DIM]`.
        lengths: int32; the second is the rows of the window.

    Written:
        out: `[lanes, batch, num_heads, 1, VALUE_DIM]` of dtype KV; 0 where a query sees nothing.
        norm: float32 `[batch, lanes, num_heads]`: the logarithm of the sum of exp(score), the sink's included.
        kept_query, kept_key: Copies of `query` and `own_key`, where it KEEPS them. The selection reads these; the model
            may have overwritten the others by then.
        window_key, window_value: The own pairs of the first WRITTEN lanes, behind the rows of the window.

    *_CHANNELS are powers of two, not below the channels. BLOCK_S parts are read at once, and BLOCK_C channels written.
    """
    number = tl.program_id(0).to(tl.int64)  # counted over [batch, lanes, num_heads]
    head = number % num_heads
    lane = (number // num_heads) % LANES
    batch_row = number // (num_heads * LANES)
    channel = tl.arange(0, VALUE_CHANNELS)
    channel_ok = channel < VALUE_DIM
    greatest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([VALUE_CHANNELS], tl.float32)
    of_codes = tl.zeros([VALUE_CHANNELS], tl.float32)
    for first in range(0, splits, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        ok = part < splits
        at = number * splits + part
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
    total_or_1 = tl.where(total > 0, total, 1.0)
    acc = acc / total_or_1
    of_codes = of_codes / total_or_1
    to = (lane * batch + batch_row) * num_heads + head
    if CENTRED:
        for first in range(0, VALUE_CHANNELS, BLOCK_C):
            column = first + tl.arange(0, BLOCK_C)
            own = tl.sum(tl.where(channel[:, None] == column[None, :], acc[:, None], 0.0), 0)
            both = own + turned(of_codes, turn_back, column, channel, channel_ok, VALUE_DIM)
            tl.store(out + to * VALUE_DIM + column, rounded(both, KV, DOT).to(KV), mask=column < VALUE_DIM)
    else:
        tl.store(out + to * VALUE_DIM + channel, rounded(acc, KV, DOT).to(KV), mask=channel_ok)
    logarithm = tl.where(total > 0, greatest + tl.log(total_or_1), float("-inf"))
    tl.store(norm + number + tl.arange(0, 1), logarithm)
    if KEEPS:
        _copy_row(kept_query + to * KEY_DIM, query + to * KEY_DIM, KEY_DIM, KEY_CHANNELS)
    num_kv_heads = num_heads // NUM_GROUPS
    row = batch_row * num_kv_heads + head // NUM_GROUPS
    if KEEPS:  # not one condition: the compiler drops the branch where a constant alone decides
        if head % NUM_GROUPS == 0:
            own = lane * batch * num_kv_heads + row
            _copy_row(kept_key + own * KEY_DIM, own_key + own * KEY_DIM, KEY_DIM, KEY_CHANNELS)
    if WRITTEN > 0:
        if (lane < WRITTEN) & (head % NUM_GROUPS == 0):
            at = tl.load(lengths + 1) + lane
            own = lane * batch * num_kv_heads + row
            key_to = window_key + row * window_key_stride + at * KEY_DIM
            value_to = window_value + row * window_value_stride + at * VALUE_DIM
            _copy_row(key_to, own_key + own * KEY_DIM, KEY_DIM, KEY_CHANNELS)
            _copy_row(value_to, own_value + own * VALUE_DIM, VALUE_DIM, VALUE_CHANNELS)
