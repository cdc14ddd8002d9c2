"""products.cpp by its C interface, so that each instruction set can be tried."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from specache_fx.runtime.cpp_build import SOURCES, load_library

MAX_WEIGHTS = 8  # kMaxWeights
_i64, _address = ctypes.c_int64, ctypes.c_void_p


class _ProductsC(ctypes.Structure):
    """`SpecacheProducts` of products.cpp."""

    _fields_ = (
        *((name, _i64) for name in ("num_rows", "in", "bfloat16", "int8", "num_weights", "threads")),
        ("rows", _address),
        ("weights", _address * MAX_WEIGHTS),
        ("out", _i64 * MAX_WEIGHTS),
        ("results", _address * MAX_WEIGHTS),
    )


def has_tiles(instruction_set: str) -> bool:
    """Whether AMX multiplies bfloat16."""
    library = load_library("products", SOURCES, instruction_set)
    library.specache_has_tiles.restype = ctypes.c_bool
    return bool(library.specache_has_tiles())


def multiply(
    instruction_set: str, rows: Tensor, weights: list[Tensor], results: list[Tensor] | None = None
) -> list[Tensor]:
    """`rows @ weight.T` of up to `MAX_WEIGHTS` weights, to `results` where they are given."""
    rows = rows.contiguous()
    if results is None:
        results = [torch.empty((len(rows), len(weight)), dtype=rows.dtype) for weight in weights]
    pointers = _address * MAX_WEIGHTS
    arguments = _ProductsC(
        *(
            *rows.shape,
            rows.dtype is torch.bfloat16,
            weights[0].dtype is torch.int8,
            len(weights),
            torch.get_num_threads(),
            rows.data_ptr(),
        ),
        pointers(*(weight.data_ptr() for weight in weights)),
        (_i64 * MAX_WEIGHTS)(*map(len, weights)),
        pointers(*(result.data_ptr() for result in results)),
    )
    load_library("products", SOURCES, instruction_set).specache_products(ctypes.byref(arguments))
    return results
