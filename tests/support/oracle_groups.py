"""The oracle's affine quantisation of one group (paper eq. 2 and 3), independent of the runtime's."""

from __future__ import annotations

import torch
from torch import Tensor


def in_range(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers as `dtype`, its largest number in place of infinity."""
    largest = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
    return x.clamp(-largest, largest).to(dtype)


def quantize_group(
    x: Tensor,
    dim: int,
    bits: int,
    original: bool = False,
    stored: torch.dtype | None = None,
    steps: bool = False,
) -> Tensor:
    """Quantise `x` and back, in its dtype; all elements along `dim` share one scale and zero.

    Args:
        x: Any floating dtype.
        dim: Along which a group lies.
        bits: 1, 2, 4 or 8.
        original: Eq. 2 at 1 bit too, where eq. 3 is the rule.
        stored: Dtype of scale and zero; x's by default.
        steps: Give the scale in place of each number.
    """
    # float32, or float64 for a model in float64: wider than any KV dtype.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    if bits == 1 and not original:
        zero, scale = (3 * low + high) / 4, (high - low) / 2
    else:
        zero, scale = low, (high - low) / (2**bits - 1)
    # Not left to the formulas: 3 * low overflows where low is huge, and rounds where low is float32.
    constant = low == high
    zero, scale = torch.where(constant, low, zero), torch.where(constant, 0.0, scale)
    stored = stored or x.dtype
    zero, scale = zero.to(stored), scale.clamp(max=torch.finfo(stored).max).to(stored)

    if steps:
        return scale.to(wide.dtype).expand_as(wide)
    # A scale can also round to 0 in float16: then, too, the zero stands for the whole group.
    divisor = torch.where(scale == 0, 1.0, scale.to(wide.dtype))
    codes = torch.round((wide - zero) / divisor).clamp(0, 2**bits - 1)
    codes = torch.where(scale == 0, 0.0, codes)
    return in_range(codes * scale.to(wide.dtype) + zero.to(wide.dtype), x.dtype)
