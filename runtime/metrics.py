"""What a session counts, without a host sync on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specache_fx.runtime.select import count_topk


@dataclass
class Metrics:
    """Counters of one session; the tensors live on the device and are read by `stats()` alone."""

    steps: int = 0
    token_checks: int = 0
    token_hits: torch.Tensor | int = 0
    topk_needed: torch.Tensor | int = 0
    topk_hits: torch.Tensor | int = 0

    def count_token(self, token: torch.Tensor, speculative: torch.Tensor) -> None:
        """Compare the token fed with the one that was speculated: the exact hit rate of the paper's rebuttal."""
        self.token_checks += token.numel()
        self.token_hits = self.token_hits + (token.reshape(-1) == speculative.reshape(-1)).sum()

    def count_topk(self, scores: torch.Tensor, top_k: int, staged: torch.Tensor) -> None:
        """Count how much of what lane 0 needed had been prefetched: the top-k hit rate of the paper's rebuttal.

        Args:
            scores: float32 `[batch, num_kv_heads, num_quantized]`, lane 0's own.
            top_k: How many of them it needed.
            staged: int32 `[batch, num_kv_heads, top_k]`, what was staged for the step, -1 fills.
        """
        hits, needed = count_topk(scores, top_k, staged)
        self.topk_needed = self.topk_needed + needed
        self.topk_hits = self.topk_hits + hits


def rate(hits: torch.Tensor | int, total: torch.Tensor | int) -> float | None:
    """`hits / total`, or None where nothing was counted."""
    return float(hits) / float(total) if float(total) else None
