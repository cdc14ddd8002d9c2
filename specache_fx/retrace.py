"""Has Dynamo trace a decode graph again where it took the context's length for a constant.

Dynamo takes every size and every argument for a constant until it has seen two. So the first step over a cache of plain
tensors becomes a graph for one length, as does the first one with a mask. So does a step over a cache that counts its
tokens, as transformers' windows do. Such a graph does not know the next token's position, and the step after it
compiles anew. Handles are marked as growing when they are made (`runtime/handle.py`); tensors and counts of the
caller's are marked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch.fx import Node

from specache_fx.capture.program import Program
from specache_fx.dynamo_hooks import restores_marks
from specache_fx.traced_values import fixed_lengths

_MARKS = "_dynamo_weak_dynamic_indices"  # of torch._dynamo.maybe_mark_dynamic


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Has Dynamo trace the frame again; no error.

    Dynamo lets the first of its own restarts through from a backend. At the second it forgets the way that it took,
    which is another one now: a size that is no constant is an operator of its own.
    """


def _is_marked(tensor: torch.Tensor, dim: int) -> bool:
    return dim in getattr(tensor, _MARKS, ())


def trace_as_growing(inputs: Sequence[Node], program: Program) -> Program:
    """Mark what grows with the context and is a constant, and have Dynamo start over.

    Args:
        inputs: The graph's placeholders.
        program: The findings on it.

    Returns:
        The findings, with the lengths that are constants all the same.

    Raises:
        TraceAgain: If any was not marked before.
    """
    lengths = fixed_lengths(program.kv_lens)
    marked = _mark_counts(each.name for each in lengths if each.is_free)
    for i, dim in program.fixed_sizes.items():
        tensor = getattr(inputs[i].meta.get("grapharg"), "example", None)
        if isinstance(tensor, torch.Tensor) and not _is_marked(tensor, dim):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
            marked |= _is_marked(tensor, dim)  # Dynamo ignores it beside a mark of the caller's own
    if marked:
        raise TraceAgain(restart_reason="specache: the context's length is a variable")
    if program.decoding is None or not lengths:
        return program
    values = frozenset(each.value for each in lengths)
    return replace(program, decoding=replace(program.decoding, fixed_lengths=values))


def _mark_counts(names: Iterable[str]) -> bool:
    """Mark counts for the traces of this frame. Returns whether any was not marked before."""
    config: Any = torch.compiler.config
    marked = config.dynamic_sources
    # Dynamo splits the setting at commas, and drops its blanks.
    patterns = [f"{re.escape(name)}$" for name in names if not re.search(r"[,\s]", name)]
    new = [pattern for pattern in patterns if pattern not in marked.split(",")]
    if not new or not restores_marks():
        return False
    config.dynamic_sources = ",".join(filter(None, [marked, *new]))
    return True
