"""What codes leave out of a score, by their steps: the oracle's form of `Quantizer.score_deviation`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from support.oracle_groups import quantize_group
from support.oracle_methods import balance, by_channel, largest_power_of_two, norm_kept, of_real_tokens
from torch import Tensor

if TYPE_CHECKING:
    from specache_fx.config import SpecacheConfig

CODE_ERROR, MOST = 0.3, 20.0


def margins(config: SpecacheConfig, query: Tensor, k: Tensor, real: Tensor, num_ahead: int) -> Tensor:
    """E to the standard deviation of each score's error.

    Args:
        config: bits, group_size, quantizer.
        query: Scaled, [batch, num_kv_heads, num_kv_groups, head_dim].
        k: Keys in codes and `num_ahead` behind them, [batch, num_kv_heads, tokens, head_dim].
        real: bool [batch, tokens], False where padding is.
        num_ahead: See `oracle_methods.balance`.

    Returns:
        [batch, num_kv_heads, num_kv_groups, tokens in codes]; 1 where the error is unknown.
    """
    coded, bits, group_size = k[:, :, : k.shape[2] - num_ahead], config.bits, config.group_size
    shown = real[:, : k.shape[2]]
    query = query.double()
    if config.quantizer == "turboquant":
        factor = balance(k, group_size, shown, num_ahead)
        method = partial(norm_kept, stored=k.dtype, steps=True)
        steps = of_real_tokens(method, coded.float() / factor, bits, group_size, shown)
        # Rotated back, errors of each channel stay as large; the oracle's rotation divides by its size.
        query = query * factor.double() * largest_power_of_two(k.shape[3]) ** 0.5
    elif config.quantizer in ("kivi", "kivi-original"):
        original = config.quantizer == "kivi-original"

        def group(x: Tensor, bits: int) -> Tensor:
            flat = x.flatten(2)
            return quantize_group(flat, 2, bits, original=original, steps=True).view_as(x)

        steps = of_real_tokens(by_channel(group), coded, bits, group_size, shown)
    else:
        return torch.ones((), dtype=torch.float64)
    squares = query.square() @ steps.double().square().transpose(2, 3)
    return (CODE_ERROR * squares.sqrt()).clamp(max=MOST).exp()
