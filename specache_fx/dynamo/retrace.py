"""Has Dynamo trace a decode graph again where it took the context's length for a constant.

Dynamo takes every size and every argument for a constant until it has seen two. So the first step over a cache of plain
tensors becomes a graph for one length, as does the first one with a mask. So does a step over a cache that counts its
tokens, as transformers' windows do. Such a graph does not know the next token's position, and the step after it
compiles anew. Handles are marked as growing when they are made (`runtime/handles/handle.py`); tensors and counts of the
caller's are marked here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo import variables
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.fx import Node

from specache_fx.capture.graph.graph_utils import source_name
from specache_fx.capture.graph.trace import GROWS
from specache_fx.capture.program import Program
from specache_fx.direct.traced_values import Step, new_values, step_into, steps_of, warn_unreadable
from specache_fx.dynamo.dynamo_hooks import restores_marks

_OF_CONSTANTS = ("CONSTANT_MATCH", "EQUALS_MATCH")  # guards
_MARKS = "_dynamo_weak_dynamic_indices"  # of torch._dynamo.maybe_mark_dynamic


class TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """Has Dynamo trace the frame again; no error.

    Dynamo lets the first of its own restarts through from a backend. At the second it forgets the way that it took,
    which is another one now: a size that is no constant is an operator of its own.
    """


def _is_marked(tensor: torch.Tensor, dim: int) -> bool:
    return dim in getattr(tensor, _MARKS, ())


def trace_as_growing(program: Program, inputs: Sequence[Node]) -> Program:
    """Mark what grows with the context and is a constant, and have Dynamo start over.

    Args:
        program: The findings on a graph.
        inputs: Its placeholders.

    Returns:
        The findings, with the lengths that are constants all the same.

    Raises:
        TraceAgain: If any was not marked before.
    """
    counts, lengths = _fixed_lengths(program.kv_lens)
    marked = _mark_counts(counts)
    for i, dim in program.fixed_sizes.items():
        tensor = getattr(inputs[i].meta.get("grapharg"), "example", None)
        if isinstance(tensor, torch.Tensor) and not _is_marked(tensor, dim):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
            marked |= _is_marked(tensor, dim)  # Dynamo ignores it beside a mark of the caller's own
        marked |= bool(inputs[i].meta.get(GROWS)) and _with_sizes_of_buffers()
    if marked:
        raise TraceAgain(restart_reason="specache: the context's length is a variable")
    if program.decoding is None or not lengths:
        return program
    return replace(program, decoding=replace(program.decoding, fixed_lengths=frozenset(lengths)))


def _with_sizes_of_buffers() -> bool:
    """Have sizes of modules' buffers be no constants for the traces of this frame. Returns whether they were."""
    config: Any = torch._dynamo.config
    if not config.force_parameter_static_shapes or not restores_marks():
        return False
    config.force_parameter_static_shapes = False
    return True


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


def _fixed_lengths(kv_lens: Collection[int]) -> tuple[set[str], set[int]]:
    """The counts of tokens that are constants of the graph which Dynamo is compiling.

    The traced code adds one to them, or gets them as arguments; these may equal a length by chance. Of attributes that
    are only read nothing is assumed.

    Args:
        kv_lens: Tokens of the caches in this call: a count equals one.

    Returns:
        Dynamo's names of those that can be a variable, and the values of all.
    """
    try:
        context = TracingContext.try_get()
        return (set(), set()) if context is None or not kv_lens else _read_lengths(context, kv_lens)
    except Exception as error:
        warn_unreadable(
            "what a call sets", error, "The first generation may select other pairs than later ones."
        )
        return set(), set()


def _read_lengths(context: TracingContext, kv_lens: Collection[int]) -> tuple[set[str], set[int]]:
    output = InstructionTranslator.current_tx().output
    new = dict(new_values(output.side_effects))
    names, values = set[str](), set[int]()
    for guard in context.guards_context.dynamo_guards:
        steps = steps_of(name := source_name(guard.originating_source))
        value: Any = {"L": output.local_scope, "G": output.global_scope}
        for step in steps:
            value = step_into(value, step)
        if type(value) is not int or value not in kv_lens:
            continue
        # Others are constants since code compares them with one. And 1 is the value of many options, or counts calls.
        is_chosen = value > 1 and guard.create_fn_name() in _OF_CONSTANTS
        if _later(new, steps) == value + 1:
            values.add(value)
            names |= {name} if is_chosen else set()
        elif is_chosen and steps[0] == ("L",) and all(isinstance(step, tuple) for step in steps):
            values.add(value)
    return names, values


def _later(new: Mapping[tuple[Step, ...], Any], steps: tuple[Step, ...]) -> Any:
    """What traced code sets a value to, if that is one number in this graph; None otherwise."""
    known = next((n for n in range(len(steps), 0, -1) if steps[:n] in new), None)
    variable = None if known is None else new[steps[:known]]
    for step in steps[known:]:
        variable = _item(variable, step)
    if variable is None:
        return None
    if variable.is_python_constant():
        return variable.as_python_constant()
    symbol = getattr(variable, "sym_num", None)
    return symbol.node.maybe_as_int() if isinstance(symbol, torch.SymInt) else None


def _item(variable: Any, step: Step) -> Any:
    """An item of a list or dict of Dynamo's; None where there is none."""
    key = step[0] if isinstance(step, tuple) else None
    if isinstance(variable, variables.BaseListVariable) and isinstance(key, int):
        return dict(enumerate(variable.items)).get(key)
    if isinstance(variable, variables.ConstDictVariable) and key is not None:
        keys = ((each.vt, value) for each, value in variable.items.items())
        return next((v for k, v in keys if k.is_python_constant() and k.as_python_constant() == key), None)
    return None
