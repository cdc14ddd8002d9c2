"""A layer's tensors for the CPU kernel: `SpecacheInputs` filled in."""

from __future__ import annotations

import torch

from specache_fx.runtime.kernels.base import DecodeInputs, Originals
from specache_fx.runtime.kernels.cpu.abi import CODE_PLANES, Addresses, InputsC
from specache_fx.runtime.native.cpp_build import DTYPES
from specache_fx.runtime.quant import Planes, Quantizer

SCORE_TOLERANCE = 1 / 64  # rms error of a score that bfloat16 models at 1 and 2 bits may have


def describe_cache(
    to: InputsC,
    at: Addresses,
    quantizer: Quantizer | None,
    planes: tuple[Planes, Planes],
    window_rows: tuple[torch.Tensor, torch.Tensor],
    staged: tuple[torch.Tensor, torch.Tensor] | None,
    aggregation: str,
) -> None:
    """Fill in the fields that stay as long as a layer's memory does.

    Args:
        to: Is filled in.
        at: Keeps what has an address.
        quantizer: Reads the planes; None where nothing is quantised.
        planes: See `DecodeInputs`.
        window_rows: See `DecodeInputs`.
        staged: Rows and indices, see `DecodeInputs`.
        aggregation: See `DecodeInputs`.
    """
    window_key, window_value = window_rows
    value_dim = window_value.shape[3]
    bits, group_size, centred = 2, 16, False  # where nothing is quantised
    codes: tuple[torch.Tensor | None, ...] = (None,) * len(CODE_PLANES)
    balance: torch.Tensor | None = None
    if quantizer is not None:
        bits, group_size = quantizer.bits, quantizer.group_size
        centred = quantizer.code_form == "centred"
        codes = (*planes[0][:3], *planes[1])
        balance = planes[0][3] if centred else None
    rows, indices = (None, None) if staged is None else staged
    to.dtype = DTYPES[window_key.dtype]
    to.bits, to.group_size, to.centred = bits, group_size, centred
    to.value_group = value_dim if centred else min(group_size, value_dim)
    to.batch, to.kv_heads, to.key_dim, to.value_dim = *window_key.shape[:2], window_key.shape[3], value_dim
    to.num_staged = 0 if rows is None else rows.shape[2]
    # Sinks are the same tokens in all heads: `SinkRows.indices` are `[batch, sink_tokens]`.
    to.staged_heads = indices.shape[1] if indices is not None and indices.dim() == 3 else 1
    to.max_of_heads = aggregation == "max"
    # bfloat16 and codes of so few bits lose several times that anyway.
    to.tolerance = SCORE_TOLERANCE if window_key.dtype == torch.bfloat16 and bits <= 2 else 0.0
    for name, plane in zip(CODE_PLANES, codes, strict=True):
        setattr(to, name, at.plane(plane))
    to.key_balance = at.plane(balance)
    to.window_key, to.window_value = at.plane(window_key), at.plane(window_value)
    to.staged_rows, to.staged_indices = at.plane(rows), at.of(indices)


def describe_originals(to: InputsC, at: Addresses, originals: Originals | None) -> None:
    """Fill in what attention reads from the host by itself; see `DecodeInputs.originals`."""
    to.chooses = originals is not None
    if originals is None:
        return
    to.key_share, to.value_share = originals.key_share, originals.value_share
    to.host, to.host_length = at.of(originals.table), originals.length
    to.num_read = at.of(originals.num_read)


def describe_bias(to: InputsC, at: Addresses, bias: torch.Tensor | None) -> None:
    """Fill in the bias of a step's scores; see `DecodeInputs.bias`."""
    if bias is None:
        to.bias = None
        return
    bias = bias.to(torch.float32).contiguous()
    strides = (0 if bias.shape[i] == 1 else bias.stride(i) for i in range(3))
    to.bias_lane_stride, to.bias_batch_stride, to.bias_head_stride = strides
    to.bias = at.of(bias)


def describe(inputs: DecodeInputs, at: Addresses, out: torch.Tensor, scores: torch.Tensor) -> InputsC:
    """A step's inputs, all of them.

    Args:
        inputs: The kernel computes them (`CpuKernel.misfit`).
        at: Keeps what has an address.
        out: Where the output goes, contiguous.
        scores: Where the selection scores go, contiguous.
    """
    to = InputsC()
    quantizer = inputs.quantizer if inputs.num_quantized else None
    rows, indices = inputs.staged_rows, inputs.staged_indices
    staged = None if quantizer is None or rows is None or indices is None else (rows, indices)
    planes = inputs.key_planes, inputs.value_planes
    describe_cache(to, at, quantizer, planes, inputs.window_rows, staged, inputs.aggregation)
    describe_bias(to, at, inputs.bias)
    describe_originals(to, at, inputs.originals)
    to.lanes, to.heads_per_kv = inputs.query.shape[0], inputs.query.shape[2] // inputs.key.shape[2]
    to.scale, to.softcap = inputs.scale, inputs.softcap or 0.0
    to.query, to.own_key, to.own_value = at.of(inputs.query), at.of(inputs.key), at.of(inputs.value)
    to.key_mask, to.visible = at.of(inputs.key_mask), at.of(inputs.visible)
    to.sinks = at.of(inputs.sinks, torch.float32)
    to.num_quantized, to.window_len = inputs.num_quantized, inputs.window_len
    to.independent_lanes, to.scored_lanes = inputs.independent_lanes, inputs.num_scored
    to.threads = torch.get_num_threads()
    to.out, to.scores = out.data_ptr(), scores.data_ptr()
    return to
