"""The oracle's quantisers (KIVI layout, paper eq. 2 and 3; the others in `oracle_methods`) and its selection."""

from __future__ import annotations

import torch
from support.oracle_groups import quantize_group
from support.oracle_methods import DEQUANTIZED_KEY, DEQUANTIZED_SEQUENCE, DEQUANTIZED_VALUE, Method
from torch import Tensor

# Positions by batch row and kv head: indices[batch][kv_head] is a list, best first.
Indices = list[list[list[int]]]


def quantize_dequantize_key(
    x: Tensor, bits: int, group_size: int, quantizer: str = "kivi", real: Tensor | None = None
) -> Tensor:
    """Keys [batch, num_kv_heads, tokens, head_dim] as C' has them, KIVI's per channel and `group_size` tokens.

    16 bits keep them as they are. `real`: bool [batch, tokens], False where padding is.
    """
    if bits == 16 or x.shape[2] == 0:
        return x
    if quantizer == "kivi":
        assert x.shape[2] % group_size == 0
        return torch.cat([quantize_group(group, 2, bits) for group in x.split(group_size, dim=2)], dim=2)
    if quantizer in DEQUANTIZED_SEQUENCE:
        return DEQUANTIZED_SEQUENCE[quantizer](x, bits, group_size, real)
    return _of(DEQUANTIZED_KEY, quantizer)(x, bits, group_size)


def quantize_dequantize_value(x: Tensor, bits: int, group_size: int, quantizer: str = "kivi") -> Tensor:
    """Values [batch, num_kv_heads, tokens, head_dim] as C' has them, KIVI's per token and group of channels.

    16 bits keep them as they are. The last group may be shorter than `min(group_size, head_dim)`.
    """
    if bits == 16 or x.shape[2] == 0:
        return x
    if quantizer == "kivi":
        groups = x.split(min(group_size, x.shape[3]), dim=3)
        return torch.cat([quantize_group(group, 3, bits) for group in groups], dim=3)
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
