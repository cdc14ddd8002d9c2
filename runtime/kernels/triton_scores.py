"""Triton kernel of the selection scores: softmax probabilities of the stored tokens, averaged over a group's heads.

They need the whole softmax's sum, so they come after it, in a second pass over the keys alone. Keeping the first pass's
scores instead would write and read 4 bytes for each query head, lane and token: 64 a token for 4 heads of 2 lanes,
where codes and scales of a key of 128 channels take 40 at 2 bits. It would also need room that grows with context and
batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specache_fx.runtime.kernels.triton_configs import LENGTHS, TUNED_BY, fitting, score_configs
from specache_fx.runtime.kernels.triton_form import (
    formed_scores,
    query_rows,
    query_tile,
    told_lengths,
    without_staged,
)
from specache_fx.runtime.kernels.triton_tiles import channels, key_tile, row_tile


@triton.jit
def _write_scores(
    out,
    score_stride,
    norm,
    query,
    keys,
    position,
    position_ok,
    kv_len,
    batch_row,
    kv_head,
    channel,
    channel_ok,
    batch,
    num_kv_heads,
    scale,
    softcap,
    bias,
    bias_lane,
    bias_batch,
    bias_head,
    key_mask,
    mask_stride,
    visible,
    KEY_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    DOT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    INDEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write columns `position` `[BLOCK_N]` of `out`: the probabilities of `keys`, averaged over the group's heads."""
    mean = tl.zeros([M // HEADS, BLOCK_N], tl.float32)  # of each lane
    for tile in tl.static_range(TILES):
        lane, head, row_ok = query_rows(tile, NUM_GROUPS, LANES, M, HEADS)
        query_head = kv_head * NUM_GROUPS + head
        q = query_tile(
            query,
            batch_row,
            kv_head,
            lane,
            head,
            row_ok,
            batch,
            num_kv_heads,
            channel,
            channel_ok,
            NUM_GROUPS,
            KEY_DIM,
            DOT,
        )
        scores = formed_scores(
            tl.dot(q, tl.trans(keys), input_precision="ieee"),
            position,
            position_ok,
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
            False,  # below, once a lane: of their own pairs, lane 0's alone has a column
            INDEPENDENT and not HAS_VISIBLE,
        )
        at = (batch_row * LANES + lane) * (num_kv_heads * NUM_GROUPS) + query_head
        whole = tl.load(norm + at, mask=row_ok, other=0.0)
        # A query that sees nothing has -inf twice, and their difference is no number.
        weights = tl.exp(scores - tl.where(whole == float("-inf"), 0.0, whole)[:, None])
        mean += tl.sum(tl.reshape(weights, [M // HEADS, HEADS, BLOCK_N]), 1) / NUM_GROUPS
    if HAS_MASK:
        at = batch_row * mask_stride + position
        real = tl.load(key_mask + at, mask=position_ok & (position < kv_len), other=1)
        mean = tl.where((real != 0)[None, :], mean, -1.0)
    number = tl.arange(0, M // HEADS)
    if HAS_VISIBLE:
        for each in tl.static_range(LANES):
            at = (each * batch + batch_row).to(tl.int64) * (mask_stride + LANES)
            sees = tl.load(visible + at + position, mask=position_ok & (position <= kv_len), other=1) != 0
            hidden = tl.where(position < kv_len, -1.0, 0.0)[None, :]
            mean = tl.where((number != each)[:, None] | sees[None, :], mean, hidden)
    row = ((number * batch + batch_row) * num_kv_heads + kv_head) * score_stride
    written = (number < LANES)[:, None] & (position_ok & (position <= kv_len))[None, :]
    tl.store(out + row[:, None] + position[None, :], mean, mask=written)


@triton.autotune(
    score_configs(),
    key=TUNED_BY,
    prune_configs_by={"early_config_prune": fitting},
    cache_results=True,
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
    TOLD: tl.constexpr,
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
    num_quantized, window_len = told_lengths(num_quantized, window_len, lengths, TOLD)
    kv_len = num_quantized + window_len
    kc, kb, ks, k_ok = channels(BITS, KEY_DIM, KEY_PAD)
    indices = staged_indices + head_row * top_k
    num_rows = top_k + window_len + LANES
    is_code = split < code_splits
    start = tl.where(is_code, split * code_tokens, (split - code_splits) * row_tokens)
    stop = tl.where(
        is_code, tl.minimum(start + code_tokens, num_quantized), tl.minimum(start + row_tokens, num_rows)
    )
    for first in range(start, tl.where(is_code, stop, start), BLOCK_N):
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
        _write_scores(
            out,
            score_stride,
            norm,
            code_query,  # of rotated keys; `query` where they are not
            keys,
            token,
            ok & without_staged(first, indices, top_k, BLOCK_N, BLOCK_T, ONE_PASS),
            kv_len,
            batch_row,
            kv_head,
            kc,
            k_ok,
            batch,
            num_kv_heads,
            code_scale,
            softcap,
            bias,
            bias_lane,
            bias_batch,
            bias_head,
            key_mask,
            mask_stride,
            visible,
            KEY_DIM,
            NUM_GROUPS,
            LANES,
            M,
            HEADS,
            TILES,
            DOT,
            HAS_SOFTCAP,
            HAS_BIAS,
            HAS_MASK,
            HAS_VISIBLE,
            INDEPENDENT,
            BLOCK_N,
        )
    # A loop of its own: a branch in the loop over codes keeps the compiler from pipelining its loads.
    for first in range(start, tl.where(is_code, start, stop), BLOCK_N):
        row = first + tl.arange(0, BLOCK_N)
        ok = row < stop
        keys = row_tile(
            staged_rows + head_row * top_k * (KEY_DIM + VALUE_DIM),
            window_key + head_row * window_key_stride,
            own_key + head_row * KEY_DIM,
            row,
            top_k,
            window_len,
            batch * num_kv_heads * KEY_DIM,
            kc,
            k_ok,
            0,
            KEY_DIM + VALUE_DIM,
            KEY_DIM,
            LANES,
            DOT,
        )
        position = tl.load(indices + row, mask=ok & (row < top_k), other=-1)
        position = tl.where(row < top_k, position, num_quantized + row - top_k)
        _write_scores(
            out,
            score_stride,
            norm,
            query,
            keys,
            position,
            ok & (position >= 0),
            kv_len,
            batch_row,
            kv_head,
            kc,
            k_ok,
            batch,
            num_kv_heads,
            scale,
            softcap,
            bias,
            bias_lane,
            bias_batch,
            bias_head,
            key_mask,
            mask_stride,
            visible,
            KEY_DIM,
            NUM_GROUPS,
            LANES,
            M,
            HEADS,
            TILES,
            DOT,
            HAS_SOFTCAP,
            HAS_BIAS,
            HAS_MASK,
            HAS_VISIBLE,
            INDEPENDENT,
            BLOCK_N,
        )
