"""Correction of Triton's attention: what the host holds of pairs with a large share joins the staged pairs.

    attention by codes -> lane 0's shares, with their margins -> the largest -> their rows -> attention

All of it is launched without a look at a result, so that a step can be captured.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from specache_fx.runtime.kernels.base import DecodeInputs
from specache_fx.runtime.kernels.reference import score_deviation, without_staged
from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.select import select_topk

# At most so many times the inverse of a share are read, the largest. Without margins no more than the inverse has it.
_MOST_SHARES = 2


def margins(inputs: DecodeInputs) -> torch.Tensor | None:
    """A bias of the selection scores that makes them shares with their margins; the softmax's sum is without it."""
    lanes, batch, num_heads, _, key_dim = inputs.query.shape
    query = inputs.query[0].reshape(batch, inputs.key.shape[2], -1, key_dim).float()
    deviation = score_deviation(inputs, query)
    if deviation is None:
        return inputs.bias
    added = deviation.reshape(1, batch, num_heads, -1)
    added = torch.nn.functional.pad(added, (0, inputs.window_len + lanes))
    return added if inputs.bias is None else added + inputs.bias


def with_large_shares(inputs: DecodeInputs, shares: torch.Tensor) -> DecodeInputs:
    """The inputs with pairs of a large share among the staged ones.

    Args:
        inputs: Have `originals`, which count them.
        shares: Of lane 0, float32 `[batch, num_kv_heads, at least num_quantized]`.
    """
    originals, count = inputs.originals, inputs.num_quantized
    assert originals is not None and originals.table is not None
    slots = count
    if originals.key_share:
        slots = min(slots, math.ceil(_MOST_SHARES / originals.key_share))
    free = without_staged(inputs, shares)[..., :count]
    indices = select_topk(free.masked_fill(free <= originals.key_share, -1.0), slots)
    rows = _rows_of(inputs, indices, originals.table)
    originals.num_read.add_((indices >= 0).sum())
    if inputs.staged_rows is not None and inputs.staged_indices is not None:
        rows = torch.cat([inputs.staged_rows, rows], dim=2)
        indices = torch.cat([inputs.staged_indices, indices], dim=2)
    return replace(inputs, staged_rows=rows, staged_indices=indices, originals=None)


def _rows_of(inputs: DecodeInputs, indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The host's rows of tokens, int32 `[batch, num_kv_heads, slots]`; 0 where there is none."""
    from specache_fx.runtime.kernels.triton.gather import launch_copy

    slots = indices.shape[2]
    rows = inputs.window_key.new_zeros(*indices.shape, inputs.key.shape[4] + inputs.value.shape[4])
    place = torch.arange(slots, dtype=torch.int32, device=indices.device).expand(indices.shape).contiguous()
    with triton_ops.on(indices.device):
        launch_copy(rows, torch.empty_like(indices), indices, place, table)
    return rows
