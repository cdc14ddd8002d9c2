"""KIVI's layout, with SpeCache's zero and scale at 1 bit.

Paper: SpeCache §3.4, eq. 2 (two bits and more) and eq. 3 (one bit); KIVI for the numbers that share a scale.

Plain ATen on purpose. torchao's `choose_qparams_affine`, `quantize_affine` and `dequantize_affine` don't give
these codes: they multiply by 1/scale instead of dividing (another code near a tie, NaN at scale 0), take an
integer zero (or tinygemm's midpoint, in private functions), raise a constant group's scale to an epsilon,
have no eq. 3, and refuse a shorter last group. The tests use them as an independent check of the shared part.
On a GPU one kernel gives the same bits (`on_gpu`).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from specache_fx.runtime.quant import on_gpu
from specache_fx.runtime.quant.base import CODE_ERROR, CodeForm, KVKind, Planes
from specache_fx.runtime.quant.groupwise import GroupwiseQuantizer


def evenly_spaced(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero and scale by SpeCache eq. 2: the levels go from the minimum to the maximum."""
    return low, (high - low) / (2**bits - 1)


def quarter_points(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero and scale by SpeCache eq. 3: the two levels are the midpoints of the lower and the upper half."""
    # 0.75 and 0.25 times a 16-bit number are exact, and 3 * min can't overflow. Where all are equal, the sum
    # may round in float32: take the value itself.
    zero = torch.where(low == high, low, 0.75 * low + 0.25 * high)
    return zero, 0.5 * high - 0.5 * low


class KiviQuantizer(GroupwiseQuantizer):
    """Asymmetric codes, `code * scale + zero`; the layout is `GroupwiseQuantizer`'s.

    A number comes back within half a scale; of a group of equal numbers, exactly. (A group that spans more than
    float32's largest number, in bf16 or float32, is the exception: it comes back finite and no more.)

    Bits per value at head_dim 128, group_size 64: the code's and 0.5 (a scale and a zero of 16 bits for 64).
    """

    name = "kivi"
    valid_bits = (1, 2, 4, 8)
    code_form: ClassVar[CodeForm | None] = "affine"
    exact_constants: ClassVar[tuple[KVKind, ...]] = ("key", "value")

    def quantize_key(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_key`; on a GPU by one kernel."""
        if self._packs_on_gpu and on_gpu.packs_keys(x, self.group_size):
            self._check_whole_groups(x)
            return on_gpu.pack_keys(x, self._counted(real), self.bits, self.group_size)
        return super().quantize_key(x, real)

    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_value`; on a GPU by one kernel."""
        if self._packs_on_gpu and on_gpu.packs_values(x, self.bits, self.group_size):
            self._check_whole_groups(x)
            return on_gpu.pack_values(x, self.bits, self.group_size)
        return super().quantize_value(x, real)

    def score_deviation(self, planes: Planes, query: torch.Tensor) -> torch.Tensor | None:
        """See `Quantizer.score_deviation`: the errors of channels add up by their squares."""
        if self.code_form != "affine":
            return None
        squares = query.square() @ planes[1].float().square().transpose(2, 3)
        return CODE_ERROR * squares.sqrt().repeat_interleave(self.group_size, 3)

    @property
    def _packs_on_gpu(self) -> bool:
        """Whether the kernel knows this method's formulas."""
        return True

    def _zero_and_scale(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quarter_points(low, high) if self.bits == 1 else evenly_spaced(low, high, self.bits)

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        # The clamp is needed: at one bit a group's maximum would else get code 2.
        return x.round_().clamp_(0, 2**self.bits - 1)

    def _decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.float()

    def _half_interval(self) -> float:
        return 0.5
