"""Products of a few rows with weights, as fast as the weights can be read; PyTorch's own where C++ can't be built."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from specache_fx.runtime.cpp_build import BuildError, load_library, usable_instruction_sets
from specache_fx.runtime.native import copies

_log = logging.getLogger(__name__)

MAX_ROWS = 8  # kMaxRows of products.cpp
DTYPES = (torch.float32, torch.bfloat16)
SOURCES = Path(__file__).parent


@functools.cache
def load() -> bool:
    """Have `specache::products` run in C++ on the CPU from now on; whether it does. Built at first use.

    Every weight is read once then, by all threads of PyTorch. Sums are of float32, in an order of their own: they
    differ from BLAS's by rounding. Several threads make the copies that are left to them (`SharedCopy`) before that.
    """
    try:
        library = load_library("products_op", SOURCES, usable_instruction_sets()[0], with_torch=True)
    except BuildError as error:
        _log.info("products without C++: %s", error)
        return False
    if (beside := copies.load()) is not None:
        library.specache_do_beside(beside.specache_copies_make)
    return True


def by_blas(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`rows @ weight.T` for each weight, where there is no C++.

    BLAS takes a weight times a few columns for a pass over the weight, and a few rows for a general product.

    Args:
        rows: `[num_rows, in]`, 1 to `MAX_ROWS` rows.
        weights: `[out, in]` each.

    Returns:
        `[num_rows, out]` each, contiguous.
    """
    if len(rows) == 1:
        return [rows @ weight.t() for weight in weights]
    return [(weight @ rows.t()).t().contiguous() for weight in weights]
