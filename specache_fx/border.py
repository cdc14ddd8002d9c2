"""The border of a graph: Dynamo's tensors in the form that the graph takes, and its results in Dynamo's.

Runners (`runners.py`) know caches with heads first and plain tensors. Those of this module wrap another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specache_fx.capture.program import Program
from specache_fx.capture.subclasses import flatten
from specache_fx.lowering import Compiled
from specache_fx.runners import inference
from specache_fx.runtime import handle_form
from specache_fx.runtime.handle import is_poisoned
from specache_fx.runtime.handle_form import ORDERS, Form, from_heads_first, is_laid_out, to_heads_first
from specache_fx.runtime.handle_tensor import Handle, bare, mark, plain
from specache_fx.runtime.session import Session


def as_taken(program: Program, args: Sequence[Any]) -> list[Any]:
    """Dynamo's inputs as the graph takes them after `heads_first` and `newest_tokens`."""
    taken = list(args)
    for i, heads in program.merged_inputs.items():
        taken[i] = heads_apart(taken[i], heads)
    for i, form in program.permuted_inputs.items():
        taken[i] = taken[i].permute(ORDERS[form])
    return taken + [args[i][:, -count:] for i, count in program.newest_inputs]


def heads_apart(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[batch, kv_len, num_heads, head_dim]` of a cache with merged heads: of numbers, a handle or a copy of one."""
    handle = tensor if isinstance(tensor, Handle) else None
    with bare():
        if handle is None and not is_laid_out(tensor) and not is_poisoned(tensor):
            return tensor.unflatten(2, (num_heads, -1))
        apart = to_heads_first(plain(tensor), Form.HEADS_MERGED, num_heads).transpose(1, 2)
        return apart if handle is None else mark(apart, handle.lease, handle.kv_len)


def hand_out(handle: torch.Tensor, form: Form, slot: int) -> torch.Tensor:
    """The same handle, `[batch, num_kv_heads, kv_len, head_dim]`, in another form, which its session notes."""
    assert isinstance(handle, Handle)
    session = handle.lease.session
    assert isinstance(session, Session)
    session.forms[slot] = form
    if form is Form.HEADS_FIRST:
        return handle
    with bare():
        return mark(handle_form.in_form(handle, form), handle.lease, handle.kv_len)


class UnwrapSubclasses:
    """Another runner for a model with weights of a tensor subclass (torchao's): it gets the tensors in these."""

    def __init__(self, runner: Compiled) -> None:
        self.runner = runner

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.runner(*flatten(args))


class AtBorder:
    """Another runner for a model whose inputs and outputs the graph takes and gives otherwise.

    Caches have their tokens or their sequence first, or their heads merged too (`heads_first`); ids are the whole
    sequence's (`newest_tokens`).

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
            permuted, merged = self._program.permuted_outputs, self._program.merged_outputs
            for i in {*permuted, *merged}:
                if (slot := self._program.outputs.handles.get(i)) is not None:
                    form = Form.HEADS_MERGED if i in merged else permuted[i]
                    results[i] = hand_out(results[i], form, slot)
                    continue
                # A cache that is left alone: in memory as the model's own cat would have it.
                if i in permuted:
                    results[i] = from_heads_first(results[i], permuted[i]).contiguous()
                if i in merged:
                    results[i] = results[i].flatten(2)
        return tuple(results)
