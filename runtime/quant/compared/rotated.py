"""KIVI's codes of rotated keys and values.

Paper: RotateKV (Su et al., IJCAI 2025), in its spirit: a Hadamard rotation over the channels before quantising, undone
after it.
"""

from __future__ import annotations

import torch

from specache_fx.runtime.quant.base import KVKind, Planes, saturated
from specache_fx.runtime.quant.hadamard import block_size, rotate, rotate_back
from specache_fx.runtime.quant.kivi import KiviQuantizer


class RotatedQuantizer(KiviQuantizer):
    """Rotates over the channels of a head, then quantises as `kivi`; planes are those of the rotated numbers.

    A large channel spreads over all: no channel stands out. The rotation is Hadamard's with fixed signs, orthonormal
    up to a power of two. Where `head_dim` is no power of two it goes by blocks of the largest one that divides it
    (80: 16, 96: 32; an odd `head_dim` is not rotated at all, and this is `kivi` then).

    Keys stay by channel, of rotated channels: an offset of a channel, which all tokens share, goes into the zeros. On
    normal keys with a few offset channels after RoPE (a test has them) 2 bits lose 0.04 of the variance so. By token,
    for the same bytes, they lose 0.16 with the rotation and 0.77 without. `kivi` itself loses 0.04 there: by
    channel, outlier channels do no harm in the first place.

    Differences from RotateKV: the rotation is the same for every layer and model, over the channels of one head, of
    keys after RoPE. There is no calibrated order of channels. Attention sinks are not kept at 16 bits.

    A number comes back within half the sum of its block's scales (in the orthonormal rotation: within half a scale
    for each rotated number, so that the Euclidean norm of a block's error is at most that of half its scales). Equal
    numbers need not come back exactly: keys do where all channels of a group are equal, values do not.

    Bits per value are `kivi`'s: at head_dim 128, group_size 64 the code's and 0.5.
    """

    name = "rotated"
    code_form = None
    exact_constants = ("key",)

    def quantize_key(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_key`."""
        return self._quantize_by_channel(rotate(x), x.dtype, real)

    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_value`."""
        return self._quantize_by_token(rotate(x), x.dtype)

    def dequantize_key(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantizer.dequantize_key`."""
        return saturated(rotate_back(super().dequantize_key(planes, head_dim, torch.float32)), dtype)

    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantizer.dequantize_value`."""
        return saturated(rotate_back(super().dequantize_value(planes, head_dim, torch.float32)), dtype)

    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        """`Quantizer.error_bound`: each rotated number's half scale may add up in each of its block."""
        halves = super().error_bound(planes, head_dim, kind)
        blocks = halves.unflatten(3, (-1, block_size(head_dim)))
        return blocks.sum(4, keepdim=True).expand_as(blocks).flatten(3)
