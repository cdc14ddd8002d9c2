"""KIVI as it was before SpeCache changed its zero and scale at 1 bit.

Paper: SpeCache §3.4, eq. 2 at every width; Table 5 compares it with eq. 3.
"""

from __future__ import annotations

import torch

from specache_fx.runtime.quant.kivi import KiviQuantizer, evenly_spaced


class OriginalKiviQuantizer(KiviQuantizer):
    """`kivi`, but at 1 bit the two levels are the group's minimum and maximum. From 2 bits on it is `kivi`.

    Results are thus larger than the inputs: a number in the middle becomes one of the extremes. SpeCache
    reports that models can hardly generate text from it. Layout and bits per value are `kivi`'s. At 1 bit the scale
    is the whole span: where that is more than the dtype's largest number (65504 in float16), half a scale is not the
    bound.
    """

    name = "kivi-original"
    beats_zeros = False

    def _zero_and_scale(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return evenly_spaced(low, high, self.bits)

    @property
    def _packs_on_gpu(self) -> bool:
        return self.bits > 1
