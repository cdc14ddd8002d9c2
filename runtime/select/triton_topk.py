"""Triton kernels of the selection: the same positions in the same order as `select_topk`'s, ties included.

A round keeps the best `top_k` of each block of keys; rounds follow until one block is left. 65,536 tokens
take two. A key is an int64 that holds score and position, as in `select_topk`: keys differ, so that
any correct way of sorting gives the same result.

Paper: SpeCache Alg. 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.native.launches import launch

BLOCK = 2048
_BLOCK_OF_INTERPRETER = 64  # it sorts in Python
_AT_ONCE = 64


@triton.jit(do_not_specialize=["row_stride", "head_stride", "tokens", "top_k"])
def _best_of_blocks(
    source,
    other,
    shares,
    lengths,
    out,
    row_stride,
    head_stride,
    num_kv_heads,
    tokens,
    top_k,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MIXES: tl.constexpr,
    LENGTHS_IN_MEMORY: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the best `top_k` keys of one block of one row, in order.

    Read:
        source: In the FIRST round float32 scores, `row_stride` elements a batch row, `head_stride` a kv head. Then
            contiguous int64 keys.
        other: Where it MIXES, scores of the same strides.
        shares: float32 `[batch]`: the weights of `source`; `other` weighs the rest.
        lengths: int32: the number of tokens, where that is LENGTHS_IN_MEMORY by the device's memory.

    Written:
        out: int64 keys `[rows, blocks, top_k]`; in the LAST round, of one block, int32 positions `[rows, top_k]`.

    K is a power of two, not below `top_k`, and 2 at least.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = block * BLOCK + tl.arange(0, BLOCK)
    if LENGTHS_IN_MEMORY:
        tokens = tl.load(lengths)
    ok = position < tokens
    if FIRST:
        start = (row // num_kv_heads) * row_stride + (row % num_kv_heads) * head_stride
        score = tl.load(source + start + position, mask=ok, other=-1.0)
        if MIXES:  # as `torch.lerp`
            from_other = tl.load(other + start + position, mask=ok, other=-1.0)
            share = tl.load(shares + row // num_kv_heads)
            between = score - from_other
            near = from_other + share * between
            score = tl.where(share < 0.5, near, score - between * (1 - share))
        # -0.0 has the sign of a padded token.
        order = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True).to(tl.int64)
        key = (order << 32) + (0xFFFFFFFF - position.to(tl.int64))
    else:
        key = tl.load(source + row * tokens + position, mask=ok, other=-1)
    best = tl.topk(key, K)
    place = tl.arange(0, K)
    if LAST:
        chosen = tl.where(best < 0, -1, 0xFFFFFFFF - (best & 0xFFFFFFFF))
        tl.store(out + row * top_k + place, chosen.to(tl.int32), mask=place < top_k)
    else:
        at = (row * tl.num_programs(1) + block) * top_k + place
        tl.store(out + at, best, mask=place < top_k)


@triton.jit(do_not_specialize=["row_stride", "head_stride", "top_k", "count"])
def _count_overlap(
    scores, own, positions, counts, row_stride, head_stride, num_kv_heads, top_k, count, BLOCK: tl.constexpr
):
    """Add one row's share to `counts`, float64 `[batch, 4]`; see `TopkOverlap`. A program each.

    `positions`, int32 `[rows, count]`, are compared with the top-k of `scores`: `own`, int32 `[rows, top_k]`. Strides
    are as in `_best_of_blocks`.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += (row // num_kv_heads) * row_stride + (row % num_kv_heads) * head_stride
    hits = tl.zeros([1], tl.int32)
    needed = tl.zeros([1], tl.int32)
    mass = tl.zeros([1], tl.float64)
    best = tl.zeros([1], tl.float64)
    for first in range(0, top_k, BLOCK):
        at = first + tl.arange(0, BLOCK)
        chosen = tl.load(own + row * top_k + at, mask=at < top_k, other=-1)
        needed += tl.sum((chosen >= 0).to(tl.int32), 0)
        best += tl.sum(tl.load(scores + chosen, mask=chosen >= 0, other=0.0).to(tl.float64), 0)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = tl.load(positions + row * count + at, mask=at < count, other=-1)
        found = tl.zeros([BLOCK], tl.int32)
        for other in range(0, top_k, BLOCK):
            to = other + tl.arange(0, BLOCK)
            theirs = tl.load(own + row * top_k + to, mask=to < top_k, other=-1)
            found += tl.sum((mine[:, None] == theirs[None, :]).to(tl.int32), 1)
        hits += tl.sum(((found > 0) & (mine >= 0)).to(tl.int32), 0)
        held = tl.load(scores + mine, mask=mine >= 0, other=0.0)
        mass += tl.sum(tl.where(held > 0, held, 0.0).to(tl.float64), 0)
    one = tl.arange(0, 1)
    to = counts + (row // num_kv_heads) * 4 + one
    tl.atomic_add(to, hits.to(tl.float64))
    tl.atomic_add(to + 1, needed.to(tl.float64))
    tl.atomic_add(to + 2, mass)
    tl.atomic_add(to + 3, best)


def count_overlap(
    scores: torch.Tensor,
    top_k: int,
    positions: torch.Tensor,
    counts: torch.Tensor,
    block: int | None = None,
    *,
    told: torch.Tensor | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> None:
    """Add to `counts` as `runtime.select.topk.count_overlap`: the selection's launches and one more.

    `told` and `out` are as in `select_topk`.
    """
    batch, heads, _ = scores.shape
    scores = scores if scores.stride(2) == 1 else scores.contiguous()
    own = select_topk(scores, top_k, block, told=told, out=out)
    with triton_ops.on(scores.device):
        launch(
            _count_overlap,
            (batch * heads,),
            scores=scores,
            own=own,
            positions=positions,
            counts=counts,
            row_stride=scores.stride(0),
            head_stride=scores.stride(1),
            num_kv_heads=heads,
            top_k=top_k,
            count=positions.shape[2],
            BLOCK=_AT_ONCE,
        )


def select_topk(
    scores: torch.Tensor,
    top_k: int,
    block: int | None = None,
    *,
    other: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    told: torch.Tensor | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Choose as `runtime.select.topk.select_topk`. Nothing waits for the device.

    Args:
        scores: float32 `[batch, num_kv_heads, tokens]`, the last dimension contiguous.
        top_k: How many, `block // 4` at most.
        block: Keys of a block, a power of two; by default `usual_block`.
        other: Scores of the same shape and strides: where given, what is chosen is `lerp(other, scores, shares)`'s.
        shares: float32 `[batch]`.
        told: How many tokens count, int32 `[1]` on the device; None: all.
        out: Results of each round (`rounds`); by default new.

    Returns:
        int32 `[batch, num_kv_heads, top_k]`.
    """
    block = block or usual_block(top_k)
    batch, heads, tokens = scores.shape
    scores = scores if scores.stride(2) == 1 or tokens <= 1 else scores.contiguous()
    results = rounds(scores, top_k, block) if out is None else out
    source = scores
    with triton_ops.on(scores.device):
        for number, result in enumerate(results):
            launch(
                _best_of_blocks,
                (batch * heads, max(-(-tokens // block), 1)),
                source=source,
                other=triton_ops.pointer_or(other, scores),
                shares=triton_ops.pointer_or(shares, scores),
                lengths=triton_ops.pointer_or(told, scores),
                out=result,
                row_stride=scores.stride(0),
                head_stride=scores.stride(1),
                num_kv_heads=heads,
                tokens=tokens,
                top_k=top_k,
                FIRST=number == 0,
                LAST=result is results[-1],
                MIXES=number == 0 and other is not None,
                LENGTHS_IN_MEMORY=number == 0 and told is not None,
                K=max(triton_ops.power_of_two(top_k), 2),
                BLOCK=block,
                num_warps=4,
            )
            source, tokens = result, max(-(-tokens // block), 1) * top_k
    return results[-1]


def usual_block(top_k: int) -> int:
    """Keys of a block where nobody says."""
    if not triton_ops.interpreted():
        return BLOCK
    return max(_BLOCK_OF_INTERPRETER, 4 * triton_ops.power_of_two(top_k))


def rounds(scores: torch.Tensor, top_k: int, block: int | None = None) -> list[torch.Tensor]:
    """Results of each round of a selection: int64 `[rows, blocks, top_k]`, and last its result; empty."""
    block = block or usual_block(top_k)
    batch, heads, tokens = scores.shape
    results = []
    while (blocks := max(-(-tokens // block), 1)) > 1:
        results.append(scores.new_empty((batch * heads, blocks, top_k), dtype=torch.int64))
        tokens = blocks * top_k
    return [*results, scores.new_empty((batch, heads, top_k), dtype=torch.int32)]
