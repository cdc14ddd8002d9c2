"""The oracle's quantisers (KIVI layout, paper eq. 2 and 3; the others in `oracle_methods`) and its selection."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from support.oracle_groups import Quantized, quantize_group
from support.oracle_methods import DEQUANTIZED_KEY, DEQUANTIZED_SEQUENCE, DEQUANTIZED_VALUE, Method
from torch import Tensor

# Positions by batch row and kv head: indices[batch][kv_head] is a list, best first.
Indices = list[list[list[int]]]


def _join(parts: Iterable[Quantized], dim: int) -> Quantized:
    parts = list(parts)
    fields = ("codes", "scale", "zero", "dequantized")
    return Quantized(*(torch.cat([getattr(part, field) for part in parts], dim) for field in fields))


def quantize_key(x: Tensor, bits: int, group_size: int) -> Quantized:
    """Quantise keys [batch, num_kv_heads, tokens, head_dim], per channel and `group_size` tokens."""
    assert x.shape[2] % group_size == 0
    return _join((quantize_group(group, 2, bits) for group in x.split(group_size, dim=2)), dim=2)


def quantize_value(x: Tensor, bits: int, group_size: int) -> Quantized:
    """Quantise values [batch, num_kv_heads, tokens, head_dim], per token and group of channels.

    The last group may be shorter than `min(group_size, head_dim)`.
    """
    group_size = min(group_size, x.shape[3])
    return _join((quantize_group(group, 3, bits) for group in x.split(group_size, dim=3)), dim=3)


def quantize_dequantize_key(
    x: Tensor, bits: int, group_size: int, quantizer: str = "kivi", real: Tensor | None = None
) -> Tensor:
    """What `x` becomes in C'; 16 bits keep it as it is. `real`: bool [batch, tokens], False where padding is."""
    if bits == 16 or x.shape[2] == 0:
        return x
    if quantizer == "kivi":
        return quantize_key(x, bits, group_size).dequantized
    if quantizer in DEQUANTIZED_SEQUENCE:
        return DEQUANTIZED_SEQUENCE[quantizer](x, bits, group_size, real)
    return _of(DEQUANTIZED_KEY, quantizer)(x, bits, group_size)


def quantize_dequantize_value(x: Tensor, bits: int, group_size: int, quantizer: str = "kivi") -> Tensor:
    """What `x` becomes in C'; 16 bits keep it as it is."""
    if bits == 16 or x.shape[2] == 0:
        return x
    if quantizer == "kivi":
        return quantize_value(x, bits, group_size).dequantized
    return _of(DEQUANTIZED_VALUE, quantizer)(x, bits, group_size)


def _of(methods: dict[str, Method], quantizer: str) -> Method:
    assert quantizer in methods, f"{quantizer!r} is not written down in tests/support/oracle_methods.py"
    return methods[quantizer]


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
