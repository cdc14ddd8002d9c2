"""Has Dynamo trace a decode graph again where it took the context's length for a constant.

Dynamo takes every size and every integer for a constant until it has seen two. So the first step over a cache of plain
tensors becomes a graph for one length, as does the first one with a mask, or over a cache that counts its tokens (as
transformers' windows do). Such a graph does not know the next token's position, and the step after it compiles anew.
Handles are marked as growing when they are made (`runtime/handle.py`); tensors and counts of the caller's are marked
here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch.fx import Node

from specache_fx.traced_values import constant_counts

_MARKS = "_dynamo_weak_dynamic_indices"  # of torch._dynamo.maybe_mark_dynamic
_before: list[str] = []  # torch's setting, while a trace has counts that are marked in it


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Has Dynamo trace the frame again; no error.

    Dynamo lets the first of its own restarts through from a backend. At the second it forgets the way that it took,
    which is another one now: a size that is no constant is an operator of its own.
    """


def _is_marked(tensor: torch.Tensor, dim: int) -> bool:
    return dim in getattr(tensor, _MARKS, ())


def trace_as_growing(inputs: Sequence[Node], fixed: Mapping[int, int], *, is_step: bool) -> None:
    """Mark what grows with the context and is a constant, and have Dynamo start over. What is marked is left alone.

    Args:
        inputs: The graph's placeholders.
        fixed: Position to dimension of the inputs that grow with the context, of constant size here.
        is_step: The graph decodes a token: a count of tokens grows with each call.

    Raises:
        TraceAgain: If any was not marked before.
    """
    marked = _mark_counts(is_step)
    for i, dim in fixed.items():
        tensor = getattr(inputs[i].meta.get("grapharg"), "example", None)
        if isinstance(tensor, torch.Tensor) and not _is_marked(tensor, dim):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
            marked |= _is_marked(tensor, dim)  # Dynamo ignores it beside a mark of the caller's own
    if marked:
        raise TraceAgain(restart_reason="specache: the context's length is a variable")


def _mark_counts(is_step: bool) -> bool:
    """Mark a step's constant counts for the next trace alone. Returns whether there were any."""
    marked = torch.compiler.config.dynamic_sources
    # A comma and white space separate names there.
    names = [name for name in constant_counts() if not re.search(r"[,\s]", name)] if is_step else []
    new = [pattern for name in names if (pattern := f"{re.escape(name)}$") not in marked.split(",")]
    if new:
        if not _before:
            _before.append(marked)
        torch.compiler.config.dynamic_sources = ",".join(filter(None, [marked, *new]))
    elif _before:
        torch.compiler.config.dynamic_sources = _before.pop()
    return bool(new)
