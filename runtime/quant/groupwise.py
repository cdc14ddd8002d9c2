"""`GroupwiseQuantizer`: shared code of methods that give each group of numbers a scale and a zero of its own.

Paper: KIVI §3, for which numbers form a group.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from specache_fx.runtime.quant.base import KVKind, Planes, Quantizer, saturated
from specache_fx.runtime.quant.packing import pack, unpack


class GroupwiseQuantizer(Quantizer):
    """`level(code) * scale + zero`: keys by channel, values by token. Planes are `(codes, scale, zero)`.

    Codes are uint8 `[batch, num_kv_heads, tokens, ceil(head_dim * bits / 8)]`, packed along the channels.
    Scale and zero have the KV dtype: for keys `[batch, num_kv_heads, tokens / group_size, head_dim]`, one for
    each channel and group of tokens; for values `[batch, num_kv_heads, tokens, ceil(head_dim / g)]` with
    `g = min(group_size, head_dim)`, one for each token and group of channels (the last group may be shorter).

    Scale and zero are rounded to the KV dtype first, and the codes are computed from the rounded ones: the
    codes then fit the factors of dequantisation. Arithmetic is in float32. Results are always finite; a
    group whose span or scale is larger than the dtype's largest number loses accuracy at its upper end.

    A method defines scale and zero by a group's minimum and maximum, and the value of a code.
    """

    @abstractmethod
    def _zero_and_scale(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero and scale of groups with these minima and maxima, all float32; a group of equals may have scale 0."""

    @abstractmethod
    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        """The codes whose levels are nearest to float32 `(number - zero) / scale`; may overwrite it.

        Returns:
            Whole numbers below `2**bits`, of any dtype.
        """

    @abstractmethod
    def _decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The levels of uint8 codes, float32."""

    @abstractmethod
    def _half_interval(self) -> float:
        """The distance that a number may have from its level, in scales."""

    def quantize_key(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_key`."""
        return self._quantize_by_channel(x, x.dtype, real)

    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_value`. A token has its own scale, so that padding counts for nothing."""
        return self._quantize_by_token(x, x.dtype)

    def _quantize_by_channel(self, x: torch.Tensor, dtype: torch.dtype, real: torch.Tensor | None) -> Planes:
        """`quantize_key`, for scales and zeros of `dtype`, which x itself need not have."""
        self._check_whole_groups(x)
        groups = x.unflatten(2, (x.shape[2] // self.group_size, self.group_size))
        codes, scale, zero = self._quantize(groups, 3, dtype, self._counted(real))
        return pack(codes.flatten(2, 3), self.bits), scale.squeeze(3), zero.squeeze(3)

    def _quantize_by_token(self, x: torch.Tensor, dtype: torch.dtype) -> Planes:
        """`quantize_value`, for scales and zeros of `dtype`, which x itself need not have."""
        self._check_whole_groups(x)
        head_dim = x.shape[3]
        channels = self._channels(head_dim)
        missing = -head_dim % channels
        if missing:
            # Repeating the last channel fills the shorter group without moving its minimum or maximum.
            x = torch.cat([x, x[..., -1:].expand(*x.shape[:3], missing)], dim=3)
        codes, scale, zero = self._quantize(x.unflatten(3, (x.shape[3] // channels, channels)), 4, dtype)
        return pack(codes.flatten(3)[..., :head_dim], self.bits), scale.squeeze(4), zero.squeeze(4)

    def dequantize_key(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantizer.dequantize_key`."""
        packed, scale, zero = planes
        codes = unpack(packed, self.bits, head_dim).unflatten(2, (scale.shape[2], self.group_size))
        x = self._decode(codes) * scale.float().unsqueeze(3) + zero.float().unsqueeze(3)
        return saturated(x.flatten(2, 3), dtype)

    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantizer.dequantize_value`."""
        packed, scale, zero = planes
        channels = self._channels(head_dim)
        codes = unpack(packed, self.bits, head_dim)
        missing = -head_dim % channels
        if missing:
            codes = torch.nn.functional.pad(codes, (0, missing))
        codes = codes.unflatten(3, (scale.shape[3], channels))
        x = self._decode(codes) * scale.float().unsqueeze(4) + zero.float().unsqueeze(4)
        return saturated(x.flatten(3)[..., :head_dim], dtype)

    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        """`Quantizer.error_bound`: half the widest interval between levels, times the scale (docs/laws.md, law 5)."""
        bound = self._half_interval() * planes[1].float()
        if kind == "key":
            return bound.repeat_interleave(self.group_size, dim=2)
        return bound.repeat_interleave(self._channels(head_dim), dim=3)[..., :head_dim]

    def _channels(self, head_dim: int) -> int:
        """Channels of a value that share a scale and zero."""
        return min(self.group_size, head_dim)

    def _quantize(
        self, x: torch.Tensor, dim: int, dtype: torch.dtype, counted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantise groups that lie along `dim`; scale and zero keep that dimension with size 1.

        Only tokens that are `counted` (`Quantizer._counted`) make scale and zero, if given.

        Returns:
            uint8 codes shaped like x; scale and zero of `dtype`.
        """
        lows = highs = x
        if counted is not None:
            others = ~counted[:, None, :, :, None]
            lows, highs = x.masked_fill(others, torch.inf), x.masked_fill(others, -torch.inf)
        # Exact in any dtype, and half the memory traffic of converting first.
        low, high = lows.amin(dim, keepdim=True).float(), highs.amax(dim, keepdim=True).float()
        zero, scale = self._zero_and_scale(low, high)
        # An infinite scale, of a span wider than the dtype reaches, would make code 0 a NaN.
        stored_scale = scale.clamp(max=min(torch.finfo(dtype).max, torch.finfo(scale.dtype).max)).to(dtype)
        stored_zero = zero.to(dtype)
        scale, zero = stored_scale.float(), stored_zero.float()
        # A scale of 0 (all equal, or too close for the dtype): every code stands for the zero then. Dividing by 1
        # instead keeps NaN out, and what it divides is too small to matter.
        codes = self._encode((x.float() - zero).div_(torch.where(scale == 0, 1.0, scale)))
        return codes.to(torch.uint8), stored_scale, stored_zero
