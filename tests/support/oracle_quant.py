"""The oracle's quantiser (KIVI layout, paper eq. 2 and 3) and selection, independent of the runtime's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Positions by batch row and kv head: indices[batch][kv_head] is a list, best first.
Indices = list[list[list[int]]]


@dataclass(frozen=True)
class Quantized:
    """Codes, scales and zeros as stored, and what they stand for.

    Attributes:
        codes: uint8, shaped as the input, one code an element (not packed).
        scale: KV dtype; K: [batch, num_kv_heads, tokens / group_size, head_dim];
            V: [batch, num_kv_heads, tokens, ceil(head_dim / group_size)].
        zero: As `scale`.
        dequantized: KV dtype, shaped as the input.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    dequantized: Tensor


def _quantize_group(x: Tensor, dim: int, bits: int) -> Quantized:
    """Quantise `x`, all of whose elements along `dim` share one scale and zero (eq. 2; eq. 3 at 1 bit)."""
    # float32, or float64 for a model in float64: wider than any KV dtype.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    if bits == 1:
        zero, scale = (3 * low + high) / 4, (high - low) / 2
    else:
        zero, scale = low, (high - low) / (2**bits - 1)
    # Not left to the formulas: 3 * low overflows where low is huge, and rounds where low is float32.
    constant = low == high
    zero, scale = torch.where(constant, low, zero), torch.where(constant, 0.0, scale)
    zero, scale = zero.to(x.dtype), scale.to(x.dtype)

    # A scale can also round to 0 in float16: then, too, the zero stands for the whole group.
    divisor = torch.where(scale == 0, 1.0, scale.to(wide.dtype))
    codes = torch.round((wide - zero) / divisor).clamp(0, 2**bits - 1)
    codes = torch.where(scale == 0, 0.0, codes)
    dequantized = (codes * scale + zero).to(x.dtype)
    return Quantized(codes.to(torch.uint8), scale, zero, dequantized)


def _join(parts: Iterable[Quantized], dim: int) -> Quantized:
    parts = list(parts)
    fields = ("codes", "scale", "zero", "dequantized")
    return Quantized(*(torch.cat([getattr(part, field) for part in parts], dim) for field in fields))


def quantize_key(x: Tensor, bits: int, group_size: int) -> Quantized:
    """Quantise keys [batch, num_kv_heads, tokens, head_dim], per channel and `group_size` tokens."""
    assert x.shape[2] % group_size == 0
    return _join((_quantize_group(group, 2, bits) for group in x.split(group_size, dim=2)), dim=2)


def quantize_value(x: Tensor, bits: int, group_size: int) -> Quantized:
    """Quantise values [batch, num_kv_heads, tokens, head_dim], per token and group of channels.

    The last group may be shorter than `min(group_size, head_dim)`.
    """
    group_size = min(group_size, x.shape[3])
    return _join((_quantize_group(group, 3, bits) for group in x.split(group_size, dim=3)), dim=3)


def quantize_dequantize_key(x: Tensor, bits: int, group_size: int) -> Tensor:
    """What `x` becomes in C'; 16 bits keep it as it is."""
    return x if bits == 16 or x.shape[2] == 0 else quantize_key(x, bits, group_size).dequantized


def quantize_dequantize_value(x: Tensor, bits: int, group_size: int) -> Tensor:
    """What `x` becomes in C'; 16 bits keep it as it is."""
    return x if bits == 16 or x.shape[2] == 0 else quantize_value(x, bits, group_size).dequantized


def select(scores: Tensor, mask: Tensor, k: int) -> Indices:
    """The `k` best positions of each batch row and kv head, best first, ties to the lowest index.

    Args:
        scores: [batch, num_kv_heads, tokens].
        mask: bool [batch, tokens or more], True where a token is real; the others are never selected.
        k: How many; fewer real tokens than that give them all.
    """
    result: Indices = []
    for row_scores, row_mask in zip(scores.tolist(), mask.tolist(), strict=True):
        result.append([])
        for head_scores in row_scores:
            real = [index for index in range(len(head_scores)) if row_mask[index]]
            result[-1].append(sorted(real, key=lambda index, s=head_scores: (-s[index], index))[:k])  # type: ignore[misc]
    return result
