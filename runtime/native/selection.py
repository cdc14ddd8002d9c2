"""Selection on the CPU as one C++ call; PyTorch does the same where it can't be built."""

from __future__ import annotations

import ctypes
import functools

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.cpp_build import load_or_none

_i64, _address = ctypes.c_int64, ctypes.c_void_p


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, built at first use; None where it can't be."""
    loaded = load_or_none("selection", "selection")
    if loaded is None:
        return None
    loaded.specache_topk.argtypes = (_address, _i64, _i64, _i64, _i64, _address, _i64)
    loaded.specache_overlap.argtypes = (_address, *(_i64,) * 5, _address, _i64, _address, _i64)
    for function in (loaded.specache_topk, loaded.specache_overlap):
        function.restype = _i64
    return loaded


@functools.cache
def addresses() -> tuple[int, int] | None:
    """Of `specache_topk` and `specache_overlap`, for C++ to call; None where it can't be built."""
    library = load()
    if library is None:
        return None
    topk, overlap = (
        ctypes.cast(function, _address).value
        for function in (library.specache_topk, library.specache_overlap)
    )
    assert topk is not None and overlap is not None
    return topk, overlap


def select_topk(library: ctypes.CDLL, scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """See `specache_fx.runtime.select.topk.select_topk`.

    Args:
        library: What `load()` gave.
        scores: float32 `[batch, num_kv_heads, tokens]` on the CPU.
        top_k: How many.
    """
    batch, heads, tokens = scores.shape
    scores = _even_rows(scores)
    chosen = torch.empty((batch, heads, top_k), dtype=torch.int32, device="cpu")
    failed = library.specache_topk(
        *(scores.data_ptr(), batch * heads, scores.stride(1), tokens, top_k, chosen.data_ptr()),
        torch.get_num_threads(),
    )
    if failed:
        raise HostMemoryError("There is no memory to select pairs: free some, or lower top_k.")
    return chosen


def count_overlap(
    library: ctypes.CDLL, scores: torch.Tensor, top_k: int, positions: torch.Tensor, counts: torch.Tensor
) -> None:
    """See `specache_fx.runtime.select.topk.count_overlap`; tensors on the CPU.

    Args:
        library: What `load()` gave.
        scores: float32 `[batch, num_kv_heads, tokens]`.
        top_k: How many would be chosen.
        positions: int32 `[batch, num_kv_heads, n]`.
        counts: float64 `[batch, 4]`, contiguous, added to.
    """
    batch, heads, tokens = scores.shape
    scores, positions = _even_rows(scores), positions.contiguous()
    failed = library.specache_overlap(
        *(scores.data_ptr(), batch, heads, scores.stride(1), tokens, top_k, positions.data_ptr()),
        *(positions.shape[2], counts.data_ptr(), torch.get_num_threads()),
    )
    if failed:
        raise HostMemoryError("There is no memory to count hit rates: free some, or track_hit_rates=False.")


def _even_rows(scores: torch.Tensor) -> torch.Tensor:
    """Rows may lie apart (a slice of more tokens), but evenly."""
    even = scores.stride(2) == 1 and scores.stride(0) == scores.shape[1] * scores.stride(1)
    return scores if even else scores.contiguous()
