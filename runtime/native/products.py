"""Products of a few rows with weights: `specache::products` where C++ can't be built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MAX_ROWS = 32  # kMaxRows of products.cpp; BLAS gets more
MAX_WEIGHTS = 8  # kMaxWeights: overloads `of1` to `of8`
_FEW = 8
DTYPES = (torch.float32, torch.bfloat16)


def by_blas(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`rows @ weight.T` for each weight.

    BLAS takes a weight times a few columns for a pass over the weight, and rows for a general product.

    Args:
        rows: `[..., in]`, float32 or bfloat16.
        weights: `[out, in]` each, of the rows' dtype; or all int8, without their scales.

    Returns:
        `[..., out]` each, contiguous.
    """
    weights = [weight.to(rows.dtype) if weight.dtype is torch.int8 else weight for weight in weights]
    if rows.dim() != 2 or len(rows) == 1 or len(rows) > _FEW:
        return [rows @ weight.t() for weight in weights]
    return [(weight @ rows.t()).t().contiguous() for weight in weights]


def is_products(target: Any) -> bool:
    """Whether a node's target, or an operator, is an overload of `specache::products`."""
    return str(target).startswith("specache.products.")
