"""Packing of codes: 8/bits to a byte along the last dimension, the lowest channel in the lowest bits."""

from __future__ import annotations

import torch


def packed_width(channels: int, bits: int) -> int:
    """Bytes that `channels` codes of `bits` (1, 2, 4 or 8) take: the last byte may be partly empty."""
    return -(-channels * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes little-endian: channel c goes to bits `(c % (8/bits)) * bits` of byte `c // (8/bits)`.

    Args:
        codes: uint8 `[..., channels]`, each below `2**bits`.
        bits: 1, 2, 4 or 8.

    Returns:
        uint8 `[..., packed_width(channels, bits)]`, contiguous; unused bits of the last byte are 0.
    """
    per_byte = 8 // bits
    if per_byte == 1:
        return codes.contiguous()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    # OR-ing strided slices stays in uint8; a sum over a split dimension would go through int64.
    packed = codes[..., ::per_byte].clone(memory_format=torch.contiguous_format)
    for place in range(1, per_byte):
        packed |= codes[..., place::per_byte] << (place * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, channels: int) -> torch.Tensor:
    """Undo `pack`.

    Args:
        packed: uint8 `[..., packed_width(channels, bits)]`.
        bits: 1, 2, 4 or 8.
        channels: How many codes there were before padding.

    Returns:
        uint8 `[..., channels]`.
    """
    per_byte = 8 // bits
    if per_byte == 1:
        return packed[..., :channels]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :channels]
