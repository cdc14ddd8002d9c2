"""Triton kernel of the selection scores: softmax probabilities of the stored tokens, averaged over a group's heads.

They need the whole softmax's sum, so they come after it, in a second pass over the keys alone. The model does not wait
for it. Keeping the first pass's scores would be no gain:

- Bytes: 4 heads of one lane are 16 bytes a token to write and 16 to read. Codes, scale and mean of a key of 128
  channels are 38 to read at 2 bits, 22 at 1 bit. The 16 written ones would come in the pass that the model waits for.
- Memory: 67 MB of float32 a layer at 65,536 tokens, 8 kv heads and batch 8. 16 bits are too few: bfloat16 rounds a
  score of 20 by 0.06, float16 one of 2,000 by 1.
- Instructions: the second pass executes 180 a warp and 64 tokens where the first executes 314, and it runs beside
  products that wait for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_fx.runtime.kernels.triton.configs import LENGTHS, TUNED_BY, fitting, score_configs
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
from specache_fx.runtime.kernels.triton.tiles import channels, code_rows


@triton.jit
def _queries(
    tile,
    query,
    norm,
    place,
    channel,
    channel_ok,
    flags: tl.constexpr,
    KEY_DIM: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    DOT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile: its rows, the queries `[PARTS, columns, M]`, and log2 of the sums of their softmaxes `[M]`."""
    LANES: tl.constexpr = flags[0]
    NUM_GROUPS: tl.constexpr = flags[1]
    batch_row, kv_head, _batch, num_kv_heads = place
    rows = query_rows(tile, NUM_GROUPS, LANES, M, HEADS)
    lane, head, row_ok = rows
    q = query_tile(query, place, rows, channel, channel_ok, NUM_GROUPS, KEY_DIM, DOT, PARTS)
    at = ((batch_row * LANES + lane) * num_kv_heads + kv_head) * NUM_GROUPS + head
    whole = tl.load(norm + at, mask=row_ok, other=float("inf"))  # no query: no probability
    # A query that sees nothing has -inf twice, and their difference is no number.
    return rows, q, tl.where(whole == float("-inf"), 0.0, whole) * LOG2E


@triton.jit
def _summed(
    scores,
    rows,
    whole,
    position,
    position_ok,
    kv_len,
    place,
    form,
    flags: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_STORED: tl.constexpr,
):
    """Probabilities of scaled products `[PARTS, N, M]`, summed over the heads of a tile: `[PARTS, N, M / HEADS]`."""
    scores = formed_scores(scores, position, position_ok, kv_len, place, rows, form, flags, ALL_STORED)
    weights = tl.exp2(scores * LOG2E - whole[None, None, :])
    PARTS: tl.constexpr = weights.shape[0]
    N: tl.constexpr = weights.shape[1]
    M: tl.constexpr = weights.shape[2]
    return tl.sum(tl.reshape(weights, [PARTS, N, M // HEADS, HEADS]), 3)


@triton.jit
def _write(out, score_stride, summed, position, position_ok, kv_len, place, form, flags: tl.constexpr):
    """Write columns `position` `[PARTS, N]` of `out`: each lane's mean of `summed` `[PARTS, N, lanes]`.

    -1 where a token is padding, or a lane does not see it.
    """
    _softcap, _bias, _lane, _batch, _head, key_mask, mask_stride, visible = form
    LANES: tl.constexpr = flags[0]
    NUM_GROUPS: tl.constexpr = flags[1]
    HAS_MASK: tl.constexpr = flags[4]
    HAS_VISIBLE: tl.constexpr = flags[5]
    batch_row, kv_head, batch, num_kv_heads = place
    mean = summed / NUM_GROUPS
    if HAS_MASK:
        at = batch_row * mask_stride + position
        real = tl.load(key_mask + at, mask=position_ok & (position < kv_len), other=1)
        mean = tl.where((real != 0)[:, :, None], mean, -1.0)
    number = tl.arange(0, mean.shape[2])
    if HAS_VISIBLE:
        for each in tl.static_range(LANES):
            at = (each * batch + batch_row).to(tl.int64) * (mask_stride + LANES)
            sees = tl.load(visible + at + position, mask=position_ok & (position <= kv_len), other=1) != 0
            hidden = tl.where(position < kv_len, -1.0, 0.0)[:, :, None]
            mean = tl.where((number != each)[None, None, :] | sees[:, :, None], mean, hidden)
    row = ((number * batch + batch_row) * num_kv_heads + kv_head) * score_stride
    written = (number < LANES)[None, None, :] & (position_ok & (position <= kv_len))[:, :, None]
    tl.store(out + row[None, None, :] + position[:, :, None], mean, mask=written)


@triton.autotune(
    score_configs(), key=TUNED_BY, prune_configs_by={"early_config_prune": fitting}, cache_results=True
)
@triton.jit(do_not_specialize=LENGTHS)
def selection_scores(
    out,
    norm,
    query,
    code_query,
    own_key,
    key_codes,
    key_scale,
    key_zero,
    window_key,
    staged_rows,
    staged_indices,
    key_mask,
    mask_stride,
    visible,
    bias,
    key_stride,
    key_scale_stride,
    key_zero_stride,
    window_key_stride,
    bias_lane,
    bias_batch,
    bias_head,
    batch,
    num_kv_heads,
    lengths,
    num_quantized,
    window_len,
    score_stride,
    top_k,
    code_splits,
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
    NUM_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
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
    """Write a stretch of `out`, float32 `[lanes, batch, num_kv_heads, num_quantized + window_len + 1]`; see `Kernel`.

    A row has `score_stride` elements. Each column is written once: a staged token's by the stretch that holds its row.
    Arguments of the names of `partial_attention`'s are the same; TILES is the number of query tiles of a group.
    """
    head_row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    batch_row = head_row // num_kv_heads
    kv_head = head_row % num_kv_heads
    num_quantized, window_len = lengths_of_step(num_quantized, window_len, lengths, LENGTHS_IN_MEMORY)
    kv_len = num_quantized + window_len
    place = (batch_row, kv_head, batch, num_kv_heads)
    form = (softcap, bias, bias_lane, bias_batch, bias_head, key_mask, mask_stride, visible)
    flags: tl.constexpr = (LANES, NUM_GROUPS, HAS_SOFTCAP, HAS_BIAS, HAS_MASK, HAS_VISIBLE, INDEPENDENT)
    # `_write` hides a lane's unseen tokens, once a lane. Of the lanes' own pairs, lane 0's alone has a column.
    inner: tl.constexpr = (
        LANES,
        NUM_GROUPS,
        HAS_SOFTCAP,
        HAS_BIAS,
        HAS_MASK,
        False,
        INDEPENDENT and not HAS_VISIBLE,
    )
    indices = staged_indices + head_row * top_k
    if split < code_splits:
        if HAS_CODES:
            of: tl.constexpr = (BITS, KEY_UNIT, GROUP, KEY_DIM, KEY_PAD)
            planes = (
                code_rows(key_codes, head_row, key_stride, of),
                key_scale + head_row * key_scale_stride,
                key_zero + head_row * key_zero_stride,
            )
            source = code_query if CENTRED else query
            kc, k_ok = channels(of, False)
            of_first = _queries(0, source, norm, place, kc, k_ok, flags, KEY_DIM, M, HEADS, DOT, PARTS)
            opaque = tl.minimum(top_k, 0)  # see `code_tile`
            slots = first_slots(indices, top_k, BLOCK_T)
            begin, stop = code_stretch(split, code_tokens, num_quantized, GROUP)
            for first in range(begin, stop, PARTS * BLOCK_N):
                start = first + tl.arange(0, PARTS) * BLOCK_N
                token = start[:, None] + tl.arange(0, BLOCK_N)[None, :]
                ok = without_staged(start, stop, slots, indices, top_k, BLOCK_N, BLOCK_T, ONE_PASS)
                operands = key_operands(planes, start, stop, opaque, of, KV, DOT, BLOCK_N, CENTRED)
                summed = tl.zeros([PARTS, BLOCK_N, M // HEADS], tl.float32)  # of each lane
                for tile in tl.static_range(TILES):
                    if tile == 0:  # read once: the loop's stores keep the compiler from seeing that
                        rows, q, whole = of_first
                    else:
                        rows, q, whole = _queries(
                            tile, source, norm, place, kc, k_ok, flags, KEY_DIM, M, HEADS, DOT, PARTS
                        )
                    scores = key_products(operands, q, code_scale, of, BLOCK_N, CENTRED)
                    summed += _summed(scores, rows, whole, token, ok, kv_len, place, form, inner, HEADS, True)
                _write(out, score_stride, summed, token, ok, kv_len, place, form, flags)
    else:
        kc = tl.arange(0, KEY_PAD)
        ROW: tl.constexpr = KEY_DIM + VALUE_DIM
        keys = (
            staged_rows + head_row * top_k * ROW,
            window_key + head_row * window_key_stride,
            own_key + head_row * KEY_DIM,
        )
        counts = (top_k, window_len, LANES)
        begin = (split - code_splits) * row_tokens
        stop = tl.minimum(begin + row_tokens, top_k + window_len + LANES)
        # As in `partial_attention`.
        for first in tl.range(begin, stop, PARTS * ROWS, num_stages=1 if HAS_CODES else 2):
            row = first + tl.arange(0, PARTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            position = row_positions(row, stop, indices, top_k, num_quantized)
            ok = position >= 0
            k = row_tile(keys, row, counts, batch * num_kv_heads * KEY_DIM, ROW, KEY_DIM, KEY_PAD, DOT)
            summed = tl.zeros([PARTS, ROWS, M // HEADS], tl.float32)
            for tile in tl.static_range(TILES):
                rows, q, whole = _queries(
                    tile, query, norm, place, kc, kc < KEY_DIM, flags, KEY_DIM, M, HEADS, DOT, PARTS
                )
                scores = tl.dot(k, q, input_precision="ieee") * scale
                summed += _summed(scores, rows, whole, position, ok, kv_len, place, form, inner, HEADS, False)
            _write(out, score_stride, summed, position, ok, kv_len, place, form, flags)
