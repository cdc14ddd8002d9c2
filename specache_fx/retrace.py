"""Has Dynamo trace a decode graph again where it took the context's length for a constant.

Dynamo takes every size for a constant until it has seen two. The first step over a cache of plain tensors, and the
first one with a mask, so become a graph for one length: the next token's position can't be told from it, and the step
after it compiles anew. Handles are marked as growing when they are made (`runtime/handle.py`); tensors of the caller's
are marked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch.fx import Node

_MARKS = "_dynamo_weak_dynamic_indices"  # of torch._dynamo.maybe_mark_dynamic


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Has Dynamo trace the frame again; no error.

    Dynamo lets the first of its own restarts through from a backend. At the second it forgets the way that it took,
    which is another one now: a size that is no constant is an operator of its own.
    """


def _is_marked(tensor: torch.Tensor, dim: int) -> bool:
    return dim in getattr(tensor, _MARKS, ())


def trace_as_growing(inputs: Sequence[Node], fixed: Mapping[int, int]) -> None:
    """Mark inputs as growing, and have Dynamo start over. Inputs that are marked already are left alone.

    Args:
        inputs: The graph's placeholders.
        fixed: Position to dimension of the inputs that grow with the context, of constant size here.

    Raises:
        TraceAgain: If any was not marked before.
    """
    marked = False
    for i, dim in fixed.items():
        tensor = getattr(inputs[i].meta.get("grapharg"), "example", None)
        if isinstance(tensor, torch.Tensor) and not _is_marked(tensor, dim):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
            marked |= _is_marked(tensor, dim)  # Dynamo ignores it beside a mark of the caller's own
    if marked:
        raise TraceAgain(restart_reason="specache: the context's length is a variable")
