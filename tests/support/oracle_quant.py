"""The oracle's quantisers (KIVI layout, paper eq. 2 and 3; the others in `oracle_methods`) and its selection."""

from __future__ import annotations

import torch
from support.oracle_methods import (
    DEQUANTIZED_KEY,
    DEQUANTIZED_SEQUENCE,
    DEQUANTIZED_VALUE,
    Method,
    of_real_tokens,
)
from torch import Tensor

# Positions by batch row and kv head: indices[batch][kv_head] is a list, best first.
Indices = list[list[list[int]]]


def quantize_dequantize_key(
    x: Tensor,
    bits: int,
    group_size: int,
    quantizer: str = "kivi",
    real: Tensor | None = None,
    num_ahead: int = 0,
) -> Tensor:
    """Keys [batch, num_kv_heads, tokens, head_dim] as C' has them, KIVI's per channel and `group_size` tokens.

    16 bits keep them as they are. `real`: bool [batch, tokens], False where padding is; what stands for padding is
    any number. The last `num_ahead` tokens are not quantised; a balance may be made of them.
    """
    tokens = x.shape[2] - num_ahead
    if bits == 16 or tokens <= 0:
        return x[:, :, : max(tokens, 0)]
    assert tokens % group_size == 0
    if quantizer in DEQUANTIZED_SEQUENCE:
        shown = torch.ones(len(x), x.shape[2], dtype=torch.bool) if real is None else real
        return DEQUANTIZED_SEQUENCE[quantizer](x, bits, group_size, shown, num_ahead)
    return _quantized(DEQUANTIZED_KEY, quantizer, x[:, :, :tokens], bits, group_size, real)


def quantize_dequantize_value(
    x: Tensor, bits: int, group_size: int, quantizer: str = "kivi", real: Tensor | None = None
) -> Tensor:
    """Values [batch, num_kv_heads, tokens, head_dim] as C' has them, KIVI's per token and group of channels.

    16 bits keep them as they are. The last group may be shorter than `min(group_size, head_dim)`. `real`: as of keys.
    """
    if bits == 16 or x.shape[2] == 0:
        return x
    return _quantized(DEQUANTIZED_VALUE, quantizer, x, bits, group_size, real)


def _quantized(
    methods: dict[str, Method], quantizer: str, x: Tensor, bits: int, group_size: int, real: Tensor | None
) -> Tensor:
    assert quantizer in methods, f"{quantizer!r} is not written down in tests/support/oracle_methods.py"
    method = methods[quantizer]
    if real is None or bool(real.all()):
        return method(x, bits, group_size)
    return of_real_tokens(method, x, bits, group_size, real)


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
