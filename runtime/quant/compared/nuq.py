"""Codes that are indices into a small codebook of levels, calibrated offline.

Paper: KVQuant (Hooper et al., NeurIPS 2024) §3.3 "nuqX", in its spirit. SpeCache §3.4 names it as what else could
make the low-bit copy.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from specache_fx.runtime.quant.groupwise import GroupwiseQuantizer

# The upper half of each codebook, in 1/4096; the lower half mirrors it. Midpoints of such numbers are exact in
# float32. `tests/support/lloyd_levels.py` computes the table, and a test compares.
_GRID = 4096
_UPPER_LEVELS: dict[int, tuple[int, ...]] = {
    1: (1468,),
    2: (821, 2737),
    4: (210, 633, 1067, 1524, 2014, 2558, 3187, 3964),
}


def codebook(bits: int) -> tuple[float, ...]:
    """The `2**bits` levels, ascending, of numbers between -1 and 1."""
    upper = tuple(level / _GRID for level in _UPPER_LEVELS[bits])
    return (*(-level for level in reversed(upper)), *upper)


class NonUniformQuantizer(GroupwiseQuantizer):
    """`codebook[code] * scale + zero`, with keys by channel and values by token as KVQuant and KIVI have them.

    A group is brought to -1..1 by its own minimum and maximum: zero is the middle, scale half the span. Layout and
    bytes are `GroupwiseQuantizer`'s. The levels are those of Lloyd and Max: the least mean squared error for 64
    normal numbers that are brought to -1..1 so. They lie closer where more numbers are, in the middle.

    Differences from KVQuant: the levels are the same for every layer and model, and were calibrated for the normal
    law, not by a data set. There is no Fisher information that weighs errors, no sparse copy of outliers, no
    attention sink at 16 bits, and keys are those that attention reads, with their positions (KVQuant quantises
    them before RoPE). Scales come from the group itself, for keys too, where KVQuant calibrates them: the result
    for a group depends on that group alone.

    A number comes back within the widest half interval times the scale (at 1, 2 and 4 bits 0.64, 0.33 and 0.09 of
    half the span); of a group of equal numbers, exactly. There are no 8-bit codes: 256 even
    levels leave nothing to calibrate.

    Bits per value at head_dim 128, group_size 64: the code's and 0.5.
    """

    name = "nuq"
    valid_bits = (1, 2, 4)
    exact_constants = ("key", "value")

    def __init__(self, bits: int, group_size: int) -> None:
        super().__init__(bits, group_size)
        self._levels = codebook(bits)
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def _zero_and_scale(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Where all are equal, halves of float32's smallest numbers would not add up to it.
        return torch.where(low == high, low, 0.5 * low + 0.5 * high), 0.5 * high - 0.5 * low

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        _, bounds = self._tables(x.device)
        return torch.bucketize(x.contiguous(), bounds, out_int32=True)

    def _decode(self, codes: torch.Tensor) -> torch.Tensor:
        levels, _ = self._tables(codes.device)
        return levels[codes.int()]

    def _half_interval(self) -> float:
        inner = max(above - below for below, above in pairwise(self._levels)) / 2
        return max(inner, 1 - self._levels[-1])

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Levels, and the midpoints between them, float32 on `device`; copied there once."""
        if device not in self._on_device:
            levels = torch.tensor(self._levels, device=device)
            self._on_device[device] = levels, (levels[1:] + levels[:-1]) / 2
        return self._on_device[device]
