"""`TurboQuantizer`'s planes in one C++ call on the CPU: PyTorch's but for the order of float64 sums, and faster."""

from __future__ import annotations

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.native.cpp_build import DTYPES
from specache_fx.runtime.quant.base import Planes

_MOST_TOKENS = 4096  # of a group: sums of 32 bits hold the squares of so many codes


def packs(x: torch.Tensor, group_size: int) -> bool:
    """Whether `pack` takes KV pairs like x."""
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPES
        and max(x.shape[3], group_size) <= _MOST_TOKENS
        and x.numel() > 0
        and graph_ops.load() is not None
    )


def pack(
    x: torch.Tensor,
    balance: torch.Tensor | None,
    counted: torch.Tensor | None,
    bits: int,
    group_size: int,
    distance: float,
) -> Planes:
    """Codes, scale and mean; see `TurboQuantizer`.

    Args:
        x: `[batch, num_kv_heads, tokens, head_dim]`, whole groups.
        balance: `[batch, num_kv_heads, 1, head_dim]` of x's dtype: divides x; None for nothing.
        counted: bool `[batch, tokens / group_size, group_size]`: tokens that a mean counts; None for all.
        bits: Width of a code.
        group_size: Tokens of a group.
        distance: Of levels, in standard deviations.

    Raises:
        HostMemoryError: If there is no memory to work in.
    """
    planes: list[torch.Tensor] = torch.ops.specache.centred_codes(
        x, balance, counted, bits, group_size, distance
    )
    if not planes:
        raise HostMemoryError("There is no memory to quantise pairs: free some, or shorten the context.")
    return tuple(planes)
