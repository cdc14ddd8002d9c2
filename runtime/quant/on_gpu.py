"""KIVI's planes made by one kernel on the GPU, to the bit as `KiviQuantizer` makes them."""

from __future__ import annotations

from typing import Any

import torch

from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.native.triton_ops import power_of_two
from specache_fx.runtime.quant.base import Planes
from specache_fx.runtime.quant.packing import packed_width

_MOST_TOKENS = 1024  # of a group: a tile holds whole groups
_TILE = 4096  # elements
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def packs_keys(x: torch.Tensor, group_size: int) -> bool:
    """Whether `pack_keys` takes keys like x where nobody named Triton: on a GPU, and groups fit into a tile."""
    return (
        x.dtype in _DTYPES
        and group_size <= _MOST_TOKENS
        and x.numel() > 0
        and triton_ops.runs_by_itself(x.device)
    )


def packs_values(x: torch.Tensor, bits: int, group_size: int) -> bool:
    """Whether `pack_values` takes values like x; as `packs_keys`. A group's codes have to be whole bytes."""
    whole = group_size >= x.shape[3] or group_size * bits % 8 == 0
    return whole and packs_keys(x, 1)


def pack_keys(x: torch.Tensor, counted: torch.Tensor | None, bits: int, group_size: int) -> Planes:
    """Quantise keys; see `KiviQuantizer.quantize_key`. `counted` is of `Quantizer._counted`."""
    from specache_fx.runtime.quant import triton_pack

    batch, heads, tokens, dim = x.shape
    groups, width, padded = tokens // group_size, packed_width(dim, bits), power_of_two(group_size)
    block = min(power_of_two(width), max(_TILE // padded, 1))
    grid = (batch * heads * groups, -(-width // block))
    sizes = {"GROUP": group_size, "GROUP_PAD": padded, "BLOCK": block, "COUNTED": counted is not None}
    counts = x if counted is None else counted.contiguous().view(torch.uint8)  # x is not read
    return _packed(triton_pack.pack_keys, grid, x, bits, groups, (groups, dim), sizes, counts)


def pack_values(x: torch.Tensor, bits: int, group_size: int) -> Planes:
    """Quantise values; see `KiviQuantizer.quantize_value`."""
    from specache_fx.runtime.quant import triton_pack

    batch, heads, tokens, dim = x.shape
    channels = min(group_size, dim)
    groups, width = -(-dim // channels), power_of_two(packed_width(channels, bits))
    block = max(min(power_of_two(tokens), _TILE // width, 128), 1)
    grid = (batch * heads, -(-tokens // block), groups)
    sizes = {"GROUP": channels, "BLOCK": block, "BYTES": width}
    return _packed(triton_pack.pack_values, grid, x, bits, tokens, (tokens, groups), sizes)


def _packed(
    kernel: Any,
    grid: tuple[int, ...],
    x: torch.Tensor,
    bits: int,
    count: int,
    of_scales: tuple[int, int],
    sizes: dict[str, int],
    *more: torch.Tensor,
) -> Planes:
    """Launch a kernel of `triton_pack`, of `count` groups or tokens a head. Scales: `[batch, heads, *of_scales]`."""
    batch, heads, tokens, dim = x.shape
    codes = torch.empty(batch, heads, tokens, packed_width(dim, bits), dtype=torch.uint8, device=x.device)
    scale = torch.empty(batch, heads, *of_scales, dtype=x.dtype, device=x.device)
    zero = torch.empty_like(scale)
    # 0.75 * low + 0.25 * high is rounded once for each operation in ATen.
    constants = {
        **sizes,
        "DIM": dim,
        "BITS": bits,
        "KV": triton_ops.dtype(x.dtype),
        "enable_fp_fusion": False,
    }
    with triton_ops.on(x.device):
        kernel[grid](x, *more, codes, scale, zero, *x.stride(), heads, count, **constants)
    return codes, scale, zero
