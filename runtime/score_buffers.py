"""`ScoreBuffers`: memory for selection scores that one layer hands to the next, step after step."""

from __future__ import annotations

import math

import torch


class ScoreBuffers:
    """On a CPU, where the C library asks the system anew for every piece of a megabyte, and page faults take time.

    That is what 32,768 tokens and 8 kv heads come to, a layer and step.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}  # by address

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor of that shape, with anything in it, for as long as it is not given back."""
        size = math.prod(shape)
        return self.take_flat(size)[:size].view(shape)

    def take_flat(self, size: int) -> torch.Tensor:
        """So many elements, or more."""
        flat = self._free.pop() if self._free else None
        if flat is None or flat.numel() < size:
            flat = torch.empty(size + size // 8, dtype=torch.float32, device="cpu")  # a context grows
        self._taken[flat.data_ptr()] = flat
        return flat

    def give_back(self, scores: torch.Tensor) -> None:
        """Nobody reads this tensor, one of `take`, any more."""
        self._free.append(self._taken.pop(scores.data_ptr()))
