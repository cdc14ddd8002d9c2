"""The CPU kernel: `attention.cpp`, called with the addresses of a step's tensors."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.kernels.base import DecodeInputs, Kernel, LayerForm, listed
from specache_fx.runtime.kernels.cpu.abi import Addresses
from specache_fx.runtime.kernels.cpu.arguments import describe
from specache_fx.runtime.native.cpp_build import DTYPES, SOURCES, BuildError, load_best, load_library

_NO_MEMORY = "There is no memory for the attention of a step: free some, or shorten the context."
MAX_QUERIES = 1024  # kMaxQueries of head.h
MAX_DIM = 4096  # sums of 32 bits hold the products of so many channels, or tokens of a group


class CpuKernel(Kernel):
    """Attention in one pass over the packed codes, each read once for all lanes and the whole group of heads.

    Cases for others: another quantiser, latent attention, float64.

    Args:
        instruction_set: A name in `cpp_build.INSTRUCTION_SETS`; the best that the processor has by default.
    """

    name = "cpu"

    def __init__(self, instruction_set: str | None = None) -> None:
        self.instruction_set = instruction_set

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

    def misfit(self, form: LayerForm) -> str | None:
        """The form that the library has no code for, or None."""
        if len(form.dtypes) != 1 or not form.dtypes <= DTYPES.keys():
            return f"it is for one of float32, bfloat16 and float16, and this has {listed(form.dtypes)}"
        if form.expands:
            return (
                "keys and values are computed from what is cached: latent attention, or KV heads that are repeated in"
                " another order than by repeat_interleave(groups, dim=1)"
            )
        if form.num_queries > MAX_QUERIES or max(form.key_dim, form.value_dim) > MAX_DIM:
            return f"it takes {MAX_QUERIES:,} queries a kv head and {MAX_DIM:,} channels at most"
        quantizer = form.quantizer
        if quantizer is None:
            return None
        if quantizer.code_form is None:
            return f"it reads KIVI's and TurboQuant's codes, not what {quantizer.asked_by} makes"
        if quantizer.group_size > MAX_DIM:
            return f"it reads codes in groups of {MAX_DIM:,} at most, not of {quantizer.group_size:,}"
        shared = form.value_dim > quantizer.group_size and quantizer.code_form == "affine"
        if shared and quantizer.group_size * quantizer.bits % 8:
            return f"group_size={quantizer.group_size} has bytes with codes of two groups in it"
        return None

    def _attend(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Paper: SpeCache eq. 1, Algorithm 3."""
        (lanes, batch, num_heads, _, _), (_, _, num_kv_heads, _, _) = inputs.query.shape, inputs.key.shape
        out = inputs.query.new_empty((lanes, batch, num_heads, 1, inputs.value.shape[4]))
        stored = inputs.num_quantized + inputs.window_len
        shape = (inputs.num_scored, batch, num_kv_heads, stored + 1)
        scores = torch.empty(shape, dtype=torch.float32, device="cpu")
        at = Addresses()
        if self._library.specache_attention(ctypes.byref(describe(inputs, at, out, scores))):
            raise HostMemoryError(_NO_MEMORY)
        return out, scores

    @functools.cached_property
    def address(self) -> int:
        """Of `specache_attention`, for C++ to call."""
        address = ctypes.cast(self._library.specache_attention, ctypes.c_void_p).value
        assert address is not None
        return address

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        if self.instruction_set is None:
            return load_best("attention")
        return load_library("attention", SOURCES, self.instruction_set)
