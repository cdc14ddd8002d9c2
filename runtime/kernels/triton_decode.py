"""Triton kernel of decode attention: a part of the keys, for all lanes and the heads of a group at once (split-KV).

A program takes one (batch row, kv head), one tile of its queries and one stretch of its keys: either codes, or 16-bit
rows (staged, window, the lanes' own). Codes are read once, unpacked and dequantised in registers. It leaves
the softmax over its stretch, not normalised: greatest score, sum and output. `triton_merge` puts the parts together.

Centred codes are of rotated pairs: their stretches take rotated queries, and leave rotated outputs.

No length is a constant of a compiled kernel: a growing context compiles nothing. Where `TOLD`, lengths are read from
the device's memory, and stretches are cut for what the planes have room for: a launch serves every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_fx.runtime.kernels.triton_configs import LENGTHS, TUNED_BY, decode_configs, fitting
from specache_fx.runtime.kernels.triton_form import (
    formed_scores,
    query_rows,
    query_tile,
    told_lengths,
    without_staged,
)
from specache_fx.runtime.kernels.triton_tiles import channels, key_tile, rounded, row_tile, value_tile


@triton.jit
def _add(scores, value, greatest, total, out, KV: tl.constexpr, DOT: tl.constexpr):
    """Go on with an online softmax by the scores and values of some more keys."""
    new = tl.maximum(greatest, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - shift[:, None])
    before = tl.exp(greatest - shift)
    total = total * before + tl.sum(weights, 1)
    out = out * before[:, None] + tl.dot(rounded(weights, KV, DOT), value, input_precision="ieee")
    return new, total, out


@triton.autotune(
    decode_configs(),
    key=TUNED_BY,
    prune_configs_by={"early_config_prune": fitting},
    cache_results=True,
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
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
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
    TOLD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Leave one stretch's softmax in `part_*`, float32 `[batch, lanes, num_heads, splits(, VALUE_DIM)]`."""
    head_row = tl.program_id(0).to(tl.int64)  # batch row * num_kv_heads + kv head
    split = tl.program_id(1)
    batch_row = head_row // num_kv_heads
    kv_head = head_row % num_kv_heads
    num_quantized, window_len = told_lengths(num_quantized, window_len, lengths, TOLD)
    kv_len = num_quantized + window_len
    lane, head, row_ok = query_rows(tl.program_id(2), NUM_GROUPS, LANES, M, HEADS)
    query_head = kv_head * NUM_GROUPS + head
    kc, kb, ks, k_ok = channels(BITS, KEY_DIM, KEY_PAD)
    vc, vb, vs, v_ok = channels(BITS, VALUE_DIM, VALUE_PAD)
    q = query_tile(
        query, batch_row, kv_head, lane, head, row_ok, batch, num_kv_heads, kc, k_ok, NUM_GROUPS, KEY_DIM, DOT
    )
    if CENTRED:
        code_q = query_tile(
            code_query,
            batch_row,
            kv_head,
            lane,
            head,
            row_ok,
            batch,
            num_kv_heads,
            kc,
            k_ok,
            NUM_GROUPS,
            KEY_DIM,
            DOT,
        )
    else:
        code_q = q
    greatest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, VALUE_PAD], tl.float32)

    indices = staged_indices + head_row * top_k
    start = split * code_tokens
    stop = tl.where(split < code_splits, tl.minimum(start + code_tokens, num_quantized), start)
    for first in range(start, stop, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        ok = token < stop
        keys = key_tile(
            key_codes + head_row * key_stride,
            key_scale + head_row * key_scale_stride,
            key_zero + head_row * key_zero_stride,
            first,
            ok,
            kc,
            kb,
            ks,
            k_ok,
            BITS,
            GROUP,
            KEY_DIM,
            BLOCK_N,
            KV,
            DOT,
            CENTRED,
        )
        values = value_tile(
            value_codes + head_row * value_stride,
            value_scale + head_row * value_scale_stride,
            value_zero + head_row * value_zero_stride,
            first,
            ok,
            vc,
            vb,
            vs,
            v_ok,
            BITS,
            GROUP,
            VALUE_DIM,
            BLOCK_N,
            KV,
            DOT,
            CENTRED,
        )
        scores = formed_scores(
            tl.dot(code_q, tl.trans(keys), input_precision="ieee"),
            token,
            ok & without_staged(first, indices, top_k, BLOCK_N, BLOCK_T, ONE_PASS),
            kv_len,
            lane,
            query_head,
            row_ok,
            batch_row,
            batch,
            code_scale,
            softcap,
            bias,
            bias_lane,
            bias_batch,
            bias_head,
            key_mask,
            mask_stride,
            visible,
            LANES,
            HAS_SOFTCAP,
            HAS_BIAS,
            HAS_MASK,
            HAS_VISIBLE,
            INDEPENDENT,
        )
        greatest, total, out = _add(scores, values, greatest, total, out, KV, DOT)

    num_rows = top_k + window_len + LANES
    start = (split - code_splits) * row_tokens
    stop = tl.where(split < code_splits, start, tl.minimum(start + row_tokens, num_rows))
    own = batch * num_kv_heads
    for first in range(start, stop, BLOCK_N):
        row = first + tl.arange(0, BLOCK_N)
        ok = row < stop
        position = tl.load(indices + row, mask=ok & (row < top_k), other=-1)
        position = tl.where(row < top_k, position, num_quantized + row - top_k)
        staged = staged_rows + head_row * top_k * (KEY_DIM + VALUE_DIM)
        keys = row_tile(
            staged,
            window_key + head_row * window_key_stride,
            own_key + head_row * KEY_DIM,
            row,
            top_k,
            window_len,
            own * KEY_DIM,
            kc,
            k_ok,
            0,
            KEY_DIM + VALUE_DIM,
            KEY_DIM,
            LANES,
            DOT,
        )
        values = row_tile(
            staged,
            window_value + head_row * window_value_stride,
            own_value + head_row * VALUE_DIM,
            row,
            top_k,
            window_len,
            own * VALUE_DIM,
            vc,
            v_ok,
            KEY_DIM,
            KEY_DIM + VALUE_DIM,
            VALUE_DIM,
            LANES,
            DOT,
        )
        scores = formed_scores(
            tl.dot(q, tl.trans(keys), input_precision="ieee"),
            position,
            ok & (position >= 0),
            kv_len,
            lane,
            query_head,
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
            LANES,
            HAS_SOFTCAP,
            HAS_BIAS,
            HAS_MASK,
            HAS_VISIBLE,
            INDEPENDENT,
        )
        greatest, total, out = _add(scores, values, greatest, total, out, KV, DOT)

    at = ((batch_row * LANES + lane) * (num_kv_heads * NUM_GROUPS) + query_head) * splits + split
    tl.store(part_max + at, greatest, mask=row_ok)
    tl.store(part_sum + at, total, mask=row_ok)
    tl.store(part_out + at[:, None] * VALUE_DIM + vc[None, :], out, mask=row_ok[:, None] & v_ok[None, :])
