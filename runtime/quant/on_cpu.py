"""`TurboQuantizer`'s planes in one C++ call on the CPU: PyTorch's but for the order of float64 sums, and faster."""

from __future__ import annotations

import ctypes
import functools

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.cpp_build import DTYPES, load_or_none
from specache_fx.runtime.quant.packing import packed_width

_MOST_TOKENS = 4096  # of a group: sums of 32 bits hold the squares of so many codes

_i64, _address = ctypes.c_int64, ctypes.c_void_p


class _CodesC(ctypes.Structure):
    """`SpecacheCodes` of codes.cpp."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "bits", "group_size", "batch", "heads", "groups", "dim")),
        ("threads", _i64),
        ("from_", _address),
        *((name, _i64) for name in ("batch_stride", "head_stride", "token_stride")),
        ("balance", _address),
        ("distance", ctypes.c_float),
        *((name, _address) for name in ("codes", "scale", "mean")),
    )


@functools.cache
def _load() -> ctypes.CDLL | None:
    """The library, built at first use; None where it can't be."""
    library = load_or_none("codes", "quantisation")
    if library is not None:
        library.specache_codes.argtypes, library.specache_codes.restype = (ctypes.POINTER(_CodesC),), _i64
    return library


def packs(x: torch.Tensor, group_size: int) -> bool:
    """Whether `pack` takes KV pairs like x."""
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPES
        and max(x.shape[3], group_size) <= _MOST_TOKENS
        and x.numel() > 0
        and _load() is not None
    )


def pack(
    x: torch.Tensor, balance: torch.Tensor | None, bits: int, group_size: int, distance: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `TurboQuantizer`.

    Args:
        x: `[batch, num_kv_heads, tokens, head_dim]`, whole groups.
        balance: `[batch, num_kv_heads, 1, head_dim]` of x's dtype: divides x; None for nothing.
        bits: Width of a code.
        group_size: Tokens of a group.
        distance: Of levels, in standard deviations.

    Returns:
        Codes, scale and mean.

    Raises:
        HostMemoryError: If there is no memory to work in.
    """
    library = _load()
    assert library is not None
    if x.stride(3) != 1:
        x = x.contiguous()
    batch, heads, tokens, dim = x.shape
    codes = x.new_empty((batch, heads, tokens, packed_width(dim, bits)), dtype=torch.uint8)
    scale = x.new_empty((batch, heads, tokens, 1))
    mean = x.new_empty((batch, heads, tokens // group_size, dim))
    balance = None if balance is None else balance.contiguous()
    arguments = _CodesC(
        *(DTYPES[x.dtype], bits, group_size, batch, heads, tokens // group_size, dim),
        torch.get_num_threads(),
        *(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)),
        None if balance is None else balance.data_ptr(),
        distance,
        *(plane.data_ptr() for plane in (codes, scale, mean)),
    )
    if library.specache_codes(ctypes.byref(arguments)):
        raise HostMemoryError("There is no memory to quantise pairs: free some, or shorten the context.")
    return codes, scale, mean
