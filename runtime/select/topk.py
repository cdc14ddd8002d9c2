"""The selection of KV pairs to prefetch: the largest scores, without ties left to chance."""

from __future__ import annotations

import torch


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

    Paper: SpeCache Alg. 3 (the top-k of the speculative token's attention).
    """
    tokens = scores.shape[-1]
    # A score below 0 has negative bits, and so a negative key; -0.0 does too: + 0.0 makes it 0.0.
    order = (scores + 0.0).view(torch.int32).to(torch.int64)
    positions = torch.arange(tokens, device=scores.device)
    keys = (order << 32) | (tokens - 1 - positions)
    best = keys.topk(min(top_k, tokens), dim=-1, sorted=True).values
    chosen = torch.where(best < 0, -1, tokens - 1 - (best & 0xFFFFFFFF))
    return torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[-1]), value=-1).to(torch.int32)
