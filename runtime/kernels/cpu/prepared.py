"""`Prepared`: a layer's arguments of the CPU kernel, kept from step to step."""

from __future__ import annotations

import operator
from typing import Any

import torch

from specache_fx.runtime.cpp_build import DTYPES
from specache_fx.runtime.kernels.base import DecodeInputs
from specache_fx.runtime.kernels.cpu.abi import CODE_PLANES, Addresses, InputsC

SCORE_TOLERANCE = 1 / 64  # rms error of a score that bfloat16 models at 1 and 2 bits may have


class Prepared:
    """What the kernel is told of a layer, but for what differs from step to step: that its caller fills in.

    After a product that has read all weights, Python's own memory is cold: what it looks at in a step is to be little.

    Args:
        inputs: A step's; the kernel computes them (`CpuKernel.fits`).

    Attributes:
        staged_rows: See `DecodeInputs`.
        shapes: Of the lanes' queries, keys and values.
        scale: See `DecodeInputs`.
        softcap: See `DecodeInputs`.
        is_steady: Whether a step in which nothing but the length has changed has these arguments, too.
        arguments: To be completed by `query`, `own_key`, `own_value`, `sinks`, `out`, `scores`, `shares`,
            `num_quantized`, `window_len`, `scored_lanes`, `independent_lanes` and `threads`.
    """

    def __init__(self, inputs: DecodeInputs) -> None:
        self._addresses = Addresses()
        self.arguments = _arguments(inputs, self._addresses)
        self.staged_rows = inputs.staged_rows
        self._tensors, self._numbers = _tensors(inputs), _numbers(inputs)
        own = inputs.query, inputs.key, inputs.value
        self.shapes = [tuple(x.shape) for x in own]
        self.scale, self.softcap = inputs.scale, inputs.softcap
        self.is_steady = (
            inputs.num_quantized > 0 and inputs.staged_rows is not None and not self._differs(inputs)
        )

    def serves(self, inputs: DecodeInputs) -> bool:
        """Whether these are the same layer's inputs, in the same memory."""
        if self._differs(inputs):
            return False
        # The same objects, all of them the session's, which does not change where one lies.
        return all(map(operator.is_, self._tensors, _tensors(inputs))) and self._numbers == _numbers(inputs)

    def _differs(self, inputs: DecodeInputs) -> bool:
        """Whether some of it is another step's by its nature."""
        masked = inputs.key_mask is not None or inputs.visible is not None or inputs.bias is not None
        return masked or self._addresses.copied


def _tensors(inputs: DecodeInputs) -> tuple[object, ...]:
    pairs = (
        inputs.key_planes,
        inputs.value_planes,
        *inputs.window_rows,
        inputs.staged_rows,
        inputs.staged_indices,
    )
    return *pairs, inputs.key_mask, inputs.visible, inputs.bias, inputs.quantizer


def _numbers(inputs: DecodeInputs) -> tuple[Any, ...]:
    own = inputs.query, inputs.key, inputs.value
    numbers = inputs.scale, inputs.softcap, inputs.aggregation, inputs.num_quantized > 0
    return *(x.shape for x in own), *(x.dtype for x in own), *numbers


def _arguments(inputs: DecodeInputs, at: Addresses) -> InputsC:
    lanes, batch, num_heads, _, key_dim = inputs.query.shape
    num_kv_heads, value_dim = inputs.key.shape[2], inputs.value.shape[4]
    bits, group_size, centred = 2, 16, False  # where nothing is quantised
    planes: tuple[torch.Tensor | None, ...] = (None,) * 6
    balance: torch.Tensor | None = None
    if inputs.num_quantized:
        bits, group_size = inputs.quantizer.bits, inputs.quantizer.group_size
        centred = inputs.quantizer.code_form == "centred"
        planes = (*inputs.key_planes[:3], *inputs.value_planes)
        balance = inputs.key_planes[3] if centred else None
    rows, indices = inputs.staged_rows, inputs.staged_indices
    if not inputs.num_quantized or rows is None or indices is None:
        rows = indices = None
    bias = inputs.bias
    strides: tuple[int, ...] = (0, 0, 0)
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
        strides = tuple(0 if bias.shape[i] == 1 else bias.stride(i) for i in range(3))
    return InputsC(
        dtype=DTYPES[inputs.query.dtype],
        bits=bits,
        group_size=group_size,
        value_group=value_dim if centred else min(group_size, value_dim),
        centred=centred,
        lanes=lanes,
        batch=batch,
        kv_heads=num_kv_heads,
        heads_per_kv=num_heads // num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        num_staged=0 if rows is None else rows.shape[2],
        max_of_heads=inputs.aggregation == "max",
        bias_lane_stride=strides[0],
        bias_batch_stride=strides[1],
        bias_head_stride=strides[2],
        scale=inputs.scale,
        softcap=inputs.softcap or 0.0,
        # What bfloat16 and codes of so few bits lose anyway is several times that.
        tolerance=SCORE_TOLERANCE if inputs.query.dtype == torch.bfloat16 and bits <= 2 else 0.0,
        **{name: at.plane(plane) for name, plane in zip(CODE_PLANES, planes, strict=True)},
        key_balance=at.plane(balance),
        window_key=at.plane(inputs.window_rows[0]),
        window_value=at.plane(inputs.window_rows[1]),
        staged_rows=at.plane(rows),
        staged_indices=at.of(indices),
        key_mask=at.of(inputs.key_mask),
        visible=at.of(inputs.visible),
        bias=at.of(bias),
    )
