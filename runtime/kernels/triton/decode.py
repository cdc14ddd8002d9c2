"""Triton kernel of decode attention: a part of the keys, for all lanes and the heads of a group at once (split-KV).

A program takes one (batch row, kv head), one tile of its queries and one stretch of its keys: either codes, or 16-bit
rows (staged, window, the lanes' own). Codes are read once, unpacked and dequantised in registers. It leaves
the softmax over its stretch, not normalised: greatest score, sum and output. `triton_merge` puts the parts together.

Each warp has its own tokens and its own softmax, so that none waits for another before the stretch is done. Keys and
values are the left operands of both products: the few queries fill the 8 columns of the smallest one.

Centred codes are of rotated pairs: their stretches take rotated queries, and leave rotated outputs.

No length is a constant of a compiled kernel: a growing context compiles nothing. `LENGTHS_IN_MEMORY`: they come from
the device's memory, and stretches are cut for what the planes have room for: a launch serves every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_fx.runtime.kernels.triton.configs import LENGTHS, TUNED_BY, decode_configs, fitting
from specache_fx.runtime.kernels.triton.form import (
    LOG2E,
    code_stretch,
    first_slots,
    formed_scores,
    lengths_of_step,
    query_rows,
    query_tile,
    without_staged,
)
from specache_fx.runtime.kernels.triton.products import key_operands, key_products
from specache_fx.runtime.kernels.triton.rows import ROWS, row_positions, row_tile
from specache_fx.runtime.kernels.triton.tiles import (
    channel_rows,
    channels,
    code_rows,
    code_tile,
    dequantised,
    least,
    rounded,
    step,
)


@triton.jit
def _weights(scores, greatest, total):
    """Go on with an online softmax: its weights, then its state, and the weight of the former state."""
    new = tl.maximum(greatest, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new) * LOG2E
    weights = tl.exp2(scores * LOG2E - shift[:, None, :])
    before = tl.exp2(greatest * LOG2E - shift)
    added = tl.sum(weights, 1)
    return weights, new, total * before + added, before, added


@triton.jit
def _store_part(parts, at, row_ok, greatest, total, out, channel, channel_ok, DIM: tl.constexpr):
    """Join the warps' softmaxes, `[PARTS, (columns,) M]`, and leave them."""
    part_max, part_sum, part_out = parts
    most = tl.max(greatest, 0)
    shift = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp(greatest - shift[None, :])
    tl.store(part_max + at, most, mask=row_ok)
    tl.store(part_sum + at, tl.sum(total * weights, 0), mask=row_ok)
    where = at[None, :] * DIM + channel[:, None]
    tl.store(
        part_out + where, tl.sum(out * weights[:, None, :], 0), mask=row_ok[None, :] & channel_ok[:, None]
    )


@triton.autotune(
    decode_configs(), key=TUNED_BY, prune_configs_by={"early_config_prune": fitting}, cache_results=True
)
@triton.jit(do_not_specialize=LENGTHS)
def partial_attention(
    part_max,
    part_sum,
    part_out,
    query,
    code_query,
    own_key,
    own_value,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    window_key,
    window_value,
    staged_rows,
    staged_indices,
    key_mask,
    mask_stride,
    visible,
    bias,
    key_stride,
    key_scale_stride,
    key_zero_stride,
    value_stride,
    value_scale_stride,
    value_zero_stride,
    window_key_stride,
    window_value_stride,
    bias_lane,
    bias_batch,
    bias_head,
    batch,
    num_kv_heads,
    lengths,
    num_quantized,
    window_len,
    top_k,
    code_splits,
    splits,
    code_tokens,
    row_tokens,
    length_class,
    scale,
    code_scale,
    softcap,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    KEY_UNIT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ONE_PASS: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    INDEPENDENT: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_CODES: tl.constexpr,
    LENGTHS_IN_MEMORY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Leave one stretch's softmax in `part_*`, float32 `[batch, lanes, num_heads, splits(, VALUE_DIM)]`."""
    head_row = tl.program_id(0).to(tl.int64)  # batch row * num_kv_heads + kv head
    split = tl.program_id(1)
    batch_row = head_row // num_kv_heads
    kv_head = head_row % num_kv_heads
    num_quantized, window_len = lengths_of_step(num_quantized, window_len, lengths, LENGTHS_IN_MEMORY)
    kv_len = num_quantized + window_len
    place = (batch_row, kv_head, batch, num_kv_heads)
    lane, head, row_ok = query_rows(tl.program_id(2), NUM_GROUPS, LANES, M, HEADS)
    rows = (lane, head, row_ok)
    form = (softcap, bias, bias_lane, bias_batch, bias_head, key_mask, mask_stride, visible)
    flags: tl.constexpr = (LANES, NUM_GROUPS, HAS_SOFTCAP, HAS_BIAS, HAS_MASK, HAS_VISIBLE, INDEPENDENT)
    indices = staged_indices + head_row * top_k
    greatest = tl.full([PARTS, M], float("-inf"), tl.float32)
    total = tl.zeros([PARTS, M], tl.float32)
    out = tl.zeros([PARTS, VALUE_PAD, M], tl.float32)
    if split < code_splits:
        if HAS_CODES:
            FACTORED: tl.constexpr = CENTRED and GROUP % BLOCK_N == 0
            of_keys: tl.constexpr = (BITS, KEY_UNIT, GROUP, KEY_DIM, KEY_PAD)
            of_values: tl.constexpr = (BITS, VALUE_UNIT, GROUP, VALUE_DIM, VALUE_PAD)
            planes = (
                code_rows(key_codes, head_row, key_stride, of_keys),
                key_scale + head_row * key_scale_stride,
                key_zero + head_row * key_zero_stride,
            )
            codes = code_rows(value_codes, head_row, value_stride, of_values)
            scales = value_scale + head_row * value_scale_stride
            zeros = value_zero + head_row * value_zero_stride
            channel, channel_ok = channels(of_keys, False)
            source = code_query if CENTRED else query
            q = query_tile(source, place, rows, channel, channel_ok, NUM_GROUPS, KEY_DIM, DOT, PARTS)
            opaque = tl.minimum(top_k, 0)  # see `code_tile`
            scaled = tl.zeros([PARTS, M], tl.float32)  # sum of the weights that meet codes
            slots = first_slots(indices, top_k, BLOCK_T)
            begin, stop = code_stretch(split, code_tokens, num_quantized, GROUP)
            for first in range(begin, stop, PARTS * BLOCK_N):
                start = first + tl.arange(0, PARTS) * BLOCK_N
                token = start[:, None] + tl.arange(0, BLOCK_N)[None, :]
                ok = without_staged(start, stop, slots, indices, top_k, BLOCK_N, BLOCK_T, ONE_PASS)
                operands = key_operands(planes, start, stop, opaque, of_keys, KV, DOT, BLOCK_N, CENTRED)
                scores = key_products(operands, q, code_scale, of_keys, BLOCK_N, CENTRED)
                scores = formed_scores(scores, token, ok, kv_len, place, rows, form, flags, True)
                weights, greatest, total, before, added = _weights(scores, greatest, total)
                x = code_tile(codes, start, stop, opaque, of_values, KV, DOT, BLOCK_N, True)
                out = out * before[:, None, :]
                if FACTORED:
                    # A value is `s * (STEP * x - LEAST) + mean`: s goes to the weights, and LEAST meets their sum.
                    s = tl.load(scales + token, mask=token < stop, other=0).to(tl.float32)
                    weights = rounded(weights * s[:, :, None], KV, DOT)
                    scaled = scaled * before + tl.sum(weights.to(tl.float32), 1)
                    mean = channel_rows(zeros, start // GROUP, start < stop, of_values, True)
                    share = added / step(BITS, VALUE_UNIT)
                    out += mean.to(tl.float32)[:, :, None] * share[:, None, :]
                else:
                    weights = rounded(weights, KV, DOT)
                    x = dequantised(x, scales, zeros, start, stop, of_values, KV, DOT, BLOCK_N, CENTRED, True)
                out = tl.dot(x, weights, out, input_precision="ieee")
            if FACTORED:
                out = out * step(BITS, VALUE_UNIT) - scaled[:, None, :] * least(BITS, VALUE_UNIT, True)
            at = ((batch_row * LANES + lane) * num_kv_heads + kv_head) * NUM_GROUPS + head
            at = at * splits + split
            channel, channel_ok = channels(of_values, True)
            parts = (part_max, part_sum, part_out)
            _store_part(parts, at, row_ok, greatest, total, out, channel, channel_ok, VALUE_DIM)
    else:
        channel = tl.arange(0, KEY_PAD)
        q = query_tile(query, place, rows, channel, channel < KEY_DIM, NUM_GROUPS, KEY_DIM, DOT, PARTS)
        ROW: tl.constexpr = KEY_DIM + VALUE_DIM
        own = batch * num_kv_heads
        staged = staged_rows + head_row * top_k * ROW
        keys = (staged, window_key + head_row * window_key_stride, own_key + head_row * KEY_DIM)
        values = (
            staged + KEY_DIM,
            window_value + head_row * window_value_stride,
            own_value + head_row * VALUE_DIM,
        )
        counts = (top_k, window_len, LANES)
        begin = (split - code_splits) * row_tokens
        stop = tl.minimum(begin + row_tokens, top_k + window_len + LANES)
        # Beside a loop over codes it would take more registers to begin loads an iteration ahead than there are.
        for first in tl.range(begin, stop, PARTS * ROWS, num_stages=1 if HAS_CODES else 2):
            row = first + tl.arange(0, PARTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            position = row_positions(row, stop, indices, top_k, num_quantized)
            k = row_tile(keys, row, counts, own * KEY_DIM, ROW, KEY_DIM, KEY_PAD, DOT)
            v = row_tile(values, row, counts, own * VALUE_DIM, ROW, VALUE_DIM, VALUE_PAD, DOT)
            scores = tl.dot(k, q, input_precision="ieee") * scale
            scores = formed_scores(scores, position, position >= 0, kv_len, place, rows, form, flags, False)
            weights, greatest, total, before, added = _weights(scores, greatest, total)
            weights = rounded(weights, KV, DOT)
            out = tl.dot(tl.permute(v, [0, 2, 1]), weights, out * before[:, None, :], input_precision="ieee")
        at = ((batch_row * LANES + lane) * num_kv_heads + kv_head) * NUM_GROUPS + head
        at = at * splits + split
        channel = tl.arange(0, VALUE_PAD)
        parts = (part_max, part_sum, part_out)
        _store_part(parts, at, row_ok, greatest, total, out, channel, channel < VALUE_DIM, VALUE_DIM)
