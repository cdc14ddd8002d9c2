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
from specache_fx.runtime.kernels.cpu.abi import DTYPES, Addresses
from specache_fx.runtime.kernels.cpu.prepared import Prepared
from specache_fx.runtime.kernels.exact_pairs import ExactPairsKernel

SOURCES = Path(__file__).parent
_NO_MEMORY = "There is no memory for the attention of a step: free some, or shorten the context."
MAX_QUERIES = 1024  # kMaxQueries of head.h
MAX_DIM = 4096  # sums of 32 bits hold the products of so many channels, or tokens of a group


class CpuKernel:
    """Attention in one pass over the packed codes, each read once for all lanes and the whole group of heads.

    What it is not made for (another quantiser, latent attention, float64) goes to `ExactPairsKernel` or the reference.

    Args:
        instruction_set: A name in `cpp_build.INSTRUCTION_SETS`; the best that the processor has by default.
    """

    name = "cpu"

    def __init__(self, instruction_set: str | None = None) -> None:
        self.instruction_set = instruction_set
        self._others = ExactPairsKernel()

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Say why it can't run: another device, or a library that can't be built. The first call builds it."""
        if device.type != "cpu":
            return "it is for tensors on the CPU"
        if sys.byteorder != "little":
            return "it reads codes as little-endian words"
        try:
            self._library  # noqa: B018  (loads it)
        except BuildError as error:
            return str(error)
        return None

    def fits(self, inputs: DecodeInputs) -> bool:
        """Whether the library computes this; else `ExactPairsKernel` does, or the reference."""
        dtype = inputs.query.dtype
        tensors = (inputs.key, inputs.value, *inputs.window_rows, inputs.staged_rows)
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
        prepared = inputs.memory.get(self.name)
        if prepared is None or not prepared.serves(inputs):
            if not self.fits(inputs):
                return self._others.attention(inputs)
            prepared = inputs.memory[self.name] = Prepared(inputs)
        arguments = prepared.arguments
        (lanes, batch, num_heads, _, _), (_, _, num_kv_heads, _, _) = inputs.query.shape, inputs.key.shape
        out = inputs.query.new_empty((lanes, batch, num_heads, 1, inputs.value.shape[4]))
        stored = inputs.num_quantized + inputs.window_len
        scores = inputs.scores_out
        if scores is None:
            scores = torch.empty((inputs.num_scored, batch, num_kv_heads, stored + 1), dtype=torch.float32)
        own = Addresses()
        arguments.query, arguments.own_key = own.of(inputs.query), own.of(inputs.key)
        arguments.own_value, arguments.out = own.of(inputs.value), out.data_ptr()
        arguments.scores = scores.data_ptr()
        # The model's own, and not ours to remember: their memory may be another's by the next step.
        arguments.sinks = own.of(inputs.sinks, torch.float32)
        arguments.num_quantized, arguments.window_len = inputs.num_quantized, inputs.window_len
        arguments.independent_lanes, arguments.scored_lanes = inputs.independent_lanes, inputs.num_scored
        arguments.threads = torch.get_num_threads()
        if self._library.specache_attention(ctypes.byref(arguments)):
            raise HostMemoryError(_NO_MEMORY)
        return out, scores

    @functools.cached_property
    def step_address(self) -> int:
        """Of `specache_step`: a layer's step, for C++ to call."""
        address = ctypes.cast(self._library.specache_step, ctypes.c_void_p).value
        assert address is not None
        return address

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        return load_library("attention", SOURCES, self.instruction_set or usable_instruction_sets()[0])
