"""Products of a few rows with weights, as fast as the weights can be read; PyTorch's own where C++ can't be built."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from specache_fx.runtime.cpp_build import BuildError, load_library, usable_instruction_sets

_log = logging.getLogger(__name__)

MAX_ROWS = 8  # kMaxRows of products.cpp
MAX_WEIGHTS = 8  # kMaxWeights
DTYPES = (torch.float32, torch.bfloat16)
SOURCES = Path(__file__).parent
_i64, _address = ctypes.c_int64, ctypes.c_void_p


class _ProductsC(ctypes.Structure):
    """`SpecacheProducts` of products.cpp."""

    _fields_ = (
        *((name, _i64) for name in ("num_rows", "in", "bfloat16", "num_weights", "threads")),
        ("rows", _address),
        *(
            ("weights", _address * MAX_WEIGHTS),
            ("out", _i64 * MAX_WEIGHTS),
            ("results", _address * MAX_WEIGHTS),
        ),
    )


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, built at first use; None where it can't be."""
    try:
        return typed(load_library("products", SOURCES, usable_instruction_sets()[0]))
    except BuildError as error:
        _log.info("products without C++: %s", error)
        return None


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, its function's arguments told to ctypes."""
    library.specache_products.argtypes = (ctypes.POINTER(_ProductsC),)
    library.specache_products.restype = None
    return library


def multiply(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], library: ctypes.CDLL | None = None
) -> list[torch.Tensor]:
    """`rows @ weight.T` for each weight; every weight is read once, by all threads of PyTorch.

    Sums are of float32, in an order of their own: they differ from BLAS's by rounding.

    Args:
        rows: `[num_rows, in]` on the CPU, 1 to `MAX_ROWS` rows, not empty, of a dtype in `DTYPES`.
        weights: `[out, in]` each, of the same dtype.
        library: What `typed` gave; by default what `load` gives.

    Returns:
        `[num_rows, out]` each, contiguous, of the same dtype.
    """
    library = library or load()
    if library is None:
        return [_by_blas(rows, weight) for weight in weights]
    if len(weights) > MAX_WEIGHTS:
        return multiply(rows, weights[:MAX_WEIGHTS], library) + multiply(rows, weights[MAX_WEIGHTS:], library)
    count, width = rows.shape
    half = rows.dtype is torch.bfloat16
    if half or not rows.is_contiguous():
        rows = rows.to(torch.float32).contiguous()
    weights = [weight if weight.is_contiguous() else weight.contiguous() for weight in weights]
    outs = [weight.shape[0] for weight in weights]
    results = [torch.empty((count, out), dtype=weights[0].dtype) for out in outs]
    arguments = _ProductsC(count, width, half, len(outs), torch.get_num_threads(), rows.data_ptr())
    for i, (weight, out, result) in enumerate(zip(weights, outs, results, strict=True)):
        arguments.weights[i], arguments.out[i], arguments.results[i] = (
            weight.data_ptr(),
            out,
            result.data_ptr(),
        )
    library.specache_products(ctypes.byref(arguments))
    return results


def _by_blas(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """BLAS takes a weight times a few columns for a pass over the weight, and a few rows for a general product."""
    return (weight @ rows.t()).t().contiguous() if len(rows) > 1 else rows @ weight.t()
