"""The selection of KV pairs to prefetch: the largest scores, without ties left to chance."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.native import graph_ops, triton_ops

MOST_IN_A_KERNEL = 512  # pairs that Triton's selection chooses at most


def select_topk(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Choose the `top_k` positions with the largest scores; among equal scores the lowest positions.

    `torch.topk` leaves ties open, and differs by device. Here score and position are packed into one int64
    whose order is what we want: the bits of a non-negative float32 are ordered as integers. Keys are unique,
    so the result is too. Nothing waits for the device.

    Args:
        scores: float32 `[batch, num_kv_heads, tokens]`, no NaN; entries below 0 (padding) are never chosen.
            `tokens` may be 0, and less than `top_k`.
        top_k: How many.

    Returns:
        int32 `[batch, num_kv_heads, top_k]`: positions, unique in a row, by falling score; -1 fills the end
        where fewer are valid.

    Raises:
        HostMemoryError: If there is no memory to work in.

    Paper: SpeCache Alg. 3 (the top-k of the speculative token's attention).
    """
    if top_k <= MOST_IN_A_KERNEL and triton_ops.runs_by_itself(scores.device):
        from specache_fx.runtime.select import triton_topk

        return triton_topk.select_topk(scores, top_k)
    if scores.device.type == "cpu" and graph_ops.load() is not None:
        chosen = torch.empty((*scores.shape[:2], top_k), dtype=torch.int32, device="cpu")
        if torch.ops.specache.select_topk.default(scores, top_k, chosen):
            raise HostMemoryError("There is no memory to select pairs: free some, or lower top_k.")
        return chosen
    return sorted_topk(scores, top_k)


def sorted_topk(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """`select_topk` by PyTorch alone, for devices and machines that have nothing faster."""
    tokens = scores.shape[-1]
    best = _keys(scores).topk(min(top_k, tokens), dim=-1, sorted=True).values
    chosen = torch.where(best < 0, -1, tokens - 1 - (best & 0xFFFFFFFF))
    return torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[-1]), value=-1).to(torch.int32)


class TopkOverlap(NamedTuple):
    """The overlap of some positions with a top-k, summed over kv heads; each `[batch]`, on the scores' device.

    Attributes:
        hits: How many of them would be chosen, int64.
        needed: How many would be chosen in all, int64.
        mass: Their scores, float64.
        best_mass: The scores of the top-k itself, float64: the most that `top_k` positions can have.
    """

    hits: torch.Tensor
    needed: torch.Tensor
    mass: torch.Tensor
    best_mass: torch.Tensor


def topk_overlap(scores: torch.Tensor, top_k: int, positions: torch.Tensor) -> TopkOverlap:
    """Compare `positions` with the choice of `select_topk`, without choosing.

    The least of the `top_k` largest keys is the bar: a position is among them if its key reaches it. That takes no
    sorting and no comparison of all with all, and ties are decided as in `select_topk`.

    Args:
        scores: As in `select_topk`, with at least one token.
        top_k: How many would be chosen.
        positions: int32 `[batch, num_kv_heads, n]`: positions below `tokens`, unique in a row; -1 is none. What is
            padding by now counts as none.
    """
    keys = _keys(scores)
    best = keys.topk(min(top_k, scores.shape[-1]), dim=-1, sorted=False).values
    # Where fewer than top_k are valid the bar is below 0, and a padded position must not reach it.
    bar = best.amin(dim=-1, keepdim=True).clamp_(min=0)
    at = positions.clamp(min=0).to(torch.int64)
    there = positions >= 0
    hits = (keys.gather(-1, at) >= bar) & there
    held = torch.where(there, scores.gather(-1, at), 0.0).clamp_(min=0.0)
    # The upper half of a key is its score's bits.
    most = (best >> 32).clamp_(min=0).to(torch.int32).view(torch.float32)
    heads = (1, 2)
    return TopkOverlap(
        hits.sum(heads),
        (best >= 0).sum(heads),
        held.sum(heads, dtype=torch.float64),
        most.sum(heads, dtype=torch.float64),
    )


def count_overlap(scores: torch.Tensor, top_k: int, positions: torch.Tensor, counts: torch.Tensor) -> None:
    """Add the result of `topk_overlap` to `counts`, float64 `[batch, 4]` on the scores' device."""
    if top_k <= MOST_IN_A_KERNEL and triton_ops.runs_by_itself(scores.device):
        from specache_fx.runtime.select import triton_topk

        triton_topk.count_overlap(scores, top_k, positions, counts)
    elif scores.device.type == "cpu" and graph_ops.load() is not None:
        if torch.ops.specache.count_overlap.default(scores, top_k, positions, counts):
            raise HostMemoryError(
                "There is no memory to count hit rates: free some, or track_hit_rates=False."
            )
    else:
        found = topk_overlap(scores, top_k, positions)
        counts += torch.stack([count.to(torch.float64) for count in found], dim=1)


def _keys(scores: torch.Tensor) -> torch.Tensor:
    """One int64 a token, unique in a row, ordered as `select_topk` says; below 0 for padding."""
    tokens = scores.shape[-1]
    # A score below 0 has negative bits, and so a negative key; -0.0 does too: + 0.0 makes it 0.0.
    order = (scores + 0.0).view(torch.int32)
    positions = torch.arange(tokens - 1, -1, -1, device=scores.device)
    return torch.add(positions, order, alpha=1 << 32)
