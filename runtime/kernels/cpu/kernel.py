"""The CPU kernel: `attention.cpp`, called with the addresses of a step's tensors."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.cpp_build import BuildError, load_library, usable_instruction_sets
from specache_fx.runtime.kernels.base import DecodeInputs
from specache_fx.runtime.kernels.cpu.abi import DTYPES, Addresses, InputsC
from specache_fx.runtime.kernels.reference import ReferenceKernel

SOURCES = Path(__file__).parent
MAX_QUERIES = 1024  # kMaxQueries of head.h
MAX_DIM = 4096  # sums of 32 bits hold the products of so many channels, or tokens of a group
SCORE_TOLERANCE = 1 / 64  # rms error of a score that bfloat16 models at 1 and 2 bits may have


class CpuKernel:
    """Attention in one pass over the packed codes, each read once for all lanes and the whole group of heads.

    What it is not made for (another quantiser, latent attention, float64) goes to the reference kernel.

    Args:
        instruction_set: A name in `cpp_build.INSTRUCTION_SETS`; the best that the processor has by default.
    """

    name = "cpu"

    def __init__(self, instruction_set: str | None = None) -> None:
        self.instruction_set = instruction_set
        self._reference = ReferenceKernel()

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Say why it can't run: another device, or a library that can't be built. The first call builds it."""
        if device.type != "cpu":
            return "it is for tensors on the CPU"
        if sys.byteorder != "little":
            return "it reads codes as little-endian words"
        try:
            self._library()
        except BuildError as error:
            return str(error)
        return None

    def fits(self, inputs: DecodeInputs) -> bool:
        """Whether the library computes this; else the reference kernel does."""
        dtype = inputs.query.dtype
        tensors = (inputs.key, inputs.value, inputs.window_key, inputs.window_value, inputs.staged_rows)
        if dtype not in DTYPES or any(x is not None and x.dtype != dtype for x in tensors):
            return False
        if inputs.expand is not None or inputs.query.device.type != "cpu":
            return False
        queries = inputs.query.shape[0] * inputs.query.shape[2] // inputs.key.shape[2]
        if queries > MAX_QUERIES or max(inputs.key.shape[4], inputs.value.shape[4]) > MAX_DIM:
            return False
        if not inputs.num_quantized:
            return True
        quantizer, value_dim = inputs.quantizer, inputs.value.shape[4]
        if not quantizer.is_affine or quantizer.group_size > MAX_DIM:
            return False
        # No byte of codes may have channels of two groups.
        return value_dim <= quantizer.group_size or quantizer.group_size * quantizer.bits % 8 == 0

    def attention(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with every lane; see `Kernel.attention`. Paper: SpeCache eq. 1, Algorithm 3.

        Raises:
            HostMemoryError: If there is no memory to work in.
        """
        if not self.fits(inputs):
            return self._reference.attention(inputs)
        lanes, batch, num_heads = inputs.query.shape[:3]
        num_kv_heads, value_dim = inputs.key.shape[2], inputs.value.shape[4]
        out = inputs.query.new_empty((lanes, batch, num_heads, 1, value_dim))
        stored = inputs.num_quantized + inputs.window_key.shape[2]
        scores = inputs.scores_out
        if scores is None:
            scores = torch.empty((inputs.num_scored, batch, num_kv_heads, stored + 1), dtype=torch.float32)
        addresses = Addresses()
        arguments = _arguments(inputs, addresses)
        arguments.out, arguments.scores = addresses.of(out), addresses.of(scores)
        if self._library().specache_attention(ctypes.byref(arguments)):
            raise HostMemoryError(
                "There is no memory for the attention of a step: free some, or shorten the context."
            )
        return out, scores

    @functools.cached_property
    def _library(self) -> functools.partial[ctypes.CDLL]:
        name = self.instruction_set or usable_instruction_sets()[0]
        return functools.partial(load_library, "attention", SOURCES, name)


def _arguments(inputs: DecodeInputs, at: Addresses) -> InputsC:
    lanes, batch, num_heads, _, key_dim = inputs.query.shape
    num_kv_heads, value_dim = inputs.key.shape[2], inputs.value.shape[4]
    bits, group_size = 2, 16  # where nothing is quantised
    planes: tuple[torch.Tensor | None, ...] = (None,) * 6
    if inputs.num_quantized:
        bits, group_size = inputs.quantizer.bits, inputs.quantizer.group_size
        planes = (*inputs.key_planes, *inputs.value_planes)
    rows, indices = inputs.staged_rows, inputs.staged_indices
    if not inputs.num_quantized or rows is None or indices is None:
        rows = indices = None
    bias = inputs.bias
    strides: tuple[int, ...] = (0, 0, 0)
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
        strides = tuple(0 if bias.shape[i] == 1 else bias.stride(i) for i in range(3))
    # What bfloat16 and codes of so few bits lose anyway is several times that.
    tolerance = SCORE_TOLERANCE if inputs.query.dtype == torch.bfloat16 and bits <= 2 else 0.0
    return InputsC(
        DTYPES[inputs.query.dtype],
        *(bits, group_size, min(group_size, value_dim)),
        *(lanes, batch, num_kv_heads, num_heads // num_kv_heads, key_dim, value_dim),
        *(inputs.num_quantized, inputs.window_key.shape[2], 0 if rows is None else rows.shape[2]),
        *(inputs.independent_lanes, torch.get_num_threads()),
        *(inputs.num_scored, inputs.aggregation == "max"),
        *strides,
        *(inputs.scale, inputs.softcap or 0.0, tolerance),
        *(at.of(inputs.query), at.of(inputs.key), at.of(inputs.value)),
        *(at.plane(plane) for plane in (*planes, inputs.window_key, inputs.window_value, rows)),
        *(at.of(x) for x in (indices, inputs.key_mask, inputs.visible, bias)),
        at.of(inputs.sinks, torch.float32),
    )
