"""The border of a graph: Dynamo's tensors in the form that the graph takes, and its results in Dynamo's.

Runners (`base.py`) know caches with heads first and plain tensors. Those of this module wrap another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specache_fx.capture.graph.subclasses import flatten
from specache_fx.capture.program import CacheForm, Program
from specache_fx.lowering import Compiled
from specache_fx.runners.base import inference
from specache_fx.runtime.handles.handle import is_poisoned
from specache_fx.runtime.handles.handle_form import HEADS_FIRST, in_form, is_laid_out, joined, sides_of
from specache_fx.runtime.handles.handle_tensor import Handle, bare, mark, plain
from specache_fx.runtime.session.session import Session


def as_taken(program: Program, args: Sequence[Any]) -> list[Any]:
    """Dynamo's inputs as the graph takes them after `newest_tokens` and `heads_first`."""
    taken = [*args, *(args[i][:, -count:] for i, count in program.newest_inputs)]
    for i, form in program.input_forms.items():
        taken[i], *values = sides_at_border(args[i], form)
        taken += values
    return taken


def sides_at_border(tensor: torch.Tensor, form: CacheForm) -> list[torch.Tensor]:
    """The parts of a cache with heads first (`sides_of`): of numbers, a handle or a copy of one."""
    handle = tensor if isinstance(tensor, Handle) else None
    with bare():
        is_handle = handle is not None or is_laid_out(tensor) or is_poisoned(tensor)
        sides = sides_of(plain(tensor), form.form, form.num_kv_heads, is_handle=is_handle)
        return sides if handle is None else [mark(side, handle.lease, handle.kv_len) for side in sides]


def hand_out(handles: Sequence[torch.Tensor], form: str, slot: int) -> torch.Tensor:
    """The same handle, `[batch, num_kv_heads, kv_len, head_dim]`, in another form, which its session notes.

    Args:
        handles: It, or those of the keys and the values of a pair.
        form: The form.
        slot: The first one's.
    """
    first = handles[0]
    assert isinstance(first, Handle)
    session = first.lease.session
    assert isinstance(session, Session)
    for i in range(len(handles)):
        session.forms[slot + i] = form
    if form == HEADS_FIRST:
        return first
    with bare():
        return mark(in_form(handles, form), first.lease, first.kv_len)


class UnwrapSubclasses:
    """Another runner for a model with weights of a tensor subclass (torchao's): it gets the tensors in these."""

    def __init__(self, runner: Compiled) -> None:
        self.runner = runner

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.runner(*flatten(args))


class AtBorder:
    """A runner that converts caches between the model's form and heads first.

    Caches have another form (`heads_first`); ids are the whole sequence's (`newest_tokens`).

    Attributes:
        runner: Gets and gives caches with heads first, and gets the newest ids.
    """

    def __init__(self, runner: Compiled, program: Program) -> None:
        self.runner, self._program = runner, program

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        results = list(self.runner(*as_taken(self._program, args)))
        assert self._program.outputs is not None
        with inference():
            forms = self._program.output_forms
            for i, form in forms.items():
                sides = [results[i], *([] if form.values is None else [results[form.values]])]
                if (slot := self._program.outputs.handles.get(i)) is not None:
                    results[i] = hand_out(sides, form.form, slot)
                else:  # a cache that is left alone: in memory as the model's own cat would have it
                    results[i] = joined(sides, form.form).contiguous()
            added = {form.values for form in forms.values()}
        return tuple(result for i, result in enumerate(results) if i not in added)
