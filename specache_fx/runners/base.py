"""Runners: the callables that replace Dynamo's graphs, one a phase (`decode_runner.py` has that of decode graphs).

A runner gets Dynamo's inputs and gives Dynamo's outputs. Between the two it finds or makes the session, runs the
compiled graph with the session's `state`, and puts handles where Dynamo expects KV tensors.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from specache_fx._log import warn_once
from specache_fx.capture.program import OutputPlan, Program, merged_messages
from specache_fx.errors import CacheHandleError
from specache_fx.lowering import Compiled
from specache_fx.runtime.graph.prompt_masks import PromptMasks
from specache_fx.runtime.handles.handle_tensor import Handle, plain
from specache_fx.runtime.session import claims, fixed_buffers, registry
from specache_fx.runtime.session.give_back import give_back
from specache_fx.runtime.session.session import Session

logger = logging.getLogger(__name__)
_NO_ATTENTION = "The graph has no attention over this cache. Pass it to the module that made it."
_NOT_NUMBERS = (
    "The past KV cache has NaNs in it: it is a cache of specache that was edited or cast to another dtype, or a plain"
    " one of a model that gave NaN. Pass a cache of specache back as the model returned it; its numbers can't be read"
    " or changed."
)


def note_graph(session: Session, program: Program, args: Sequence[Any]) -> None:
    """Note that a session's tokens go through a graph."""
    floats: dict[str, dict[str, str]] = {}
    for i, (module, attribute) in program.floats.items():
        floats.setdefault(module, {})[attribute] = repr(float(args[i]))
    weights = [(name, args[i]) for i, name in program.weights.items()]
    session.origin.note(weights, program.values, floats)


def assemble(
    plan: OutputPlan, kept: Sequence[Any], handles: Sequence[torch.Tensor], args: Sequence[Any]
) -> tuple[Any, ...]:
    """Dynamo's outputs from the graph's and the handles."""
    # A list, not a dict: that would take three times as long, in each step.
    total = len(plan.kept) + len(plan.handles) + len(plan.constants) + len(plan.lengths)
    outputs: list[Any] = [None] * total
    for i, value in zip(plan.kept, kept, strict=True):
        outputs[i] = value
    for i, slot in plan.handles.items():
        outputs[i] = handles[slot]
    for i, value in plan.constants.items():
        outputs[i] = value
    for i, value in zip(plan.lengths, plan.length_part(args), strict=True):
        outputs[i] = value
    return tuple(outputs)


class _Modes(torch._C._InferenceMode):
    """Its constructor enters, its exit brings all modes back: those of gradients and of autocast too."""

    autocast: Any


def inference() -> _Modes:
    """No gradients, and no inference tensors: a session outlives the mode that its prompt ran in.

    No autocast either: its casts are in the graph. The exit is C++, which an interrupt (Ctrl-C) can't split. An exit in
    Python could run when the interrupt's traceback dies, and set the step's modes anew behind the caller's `no_grad`.
    """
    modes = _Modes(False)
    try:
        torch._C._set_grad_enabled(False)
        modes.autocast = torch._C._DisableAutocast()
        modes.autocast.__enter__()
    except BaseException:
        modes.__exit__(None, None, None)
        raise
    return modes


overriding = torch._C._EnableTorchFunction
"""Lets weights of a tensor subclass (torchao's) dispatch to their class within the block.

Dynamo calls a graph without it where handles, a subclass too, are among the inputs.
"""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """As Dynamo compiles: one thread at a time, and tracing is said to be compiling.

    A decode graph is compiled when it first runs, outside of Dynamo. While FX traces, all threads see that it does, and
    Dynamo refuses to run in any, unless it is part of a compile.

    Python's garbage collector waits. A trace makes a million objects that live on. They become old ones unread: a
    collection would take a tenth of the wait for the step.
    """
    with compile_lock:
        before, collects = torch.compiler._is_compiling_flag, gc.isenabled()
        torch.compiler._is_compiling_flag = True
        gc.disable()
        try:
            with overriding():
                yield
        finally:
            torch.compiler._is_compiling_flag = before
            if collects:
                if gc.get_freeze_count() == 0:  # else the program's own are frozen, and stay so
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


class LeftAlone:
    """A graph without a rewritten attention. It gets 16-bit pairs in place of handles.

    Args:
        compiled: Runs it.
        program: The findings on it.
        sizes: Positions of inputs that it reads no number of: a handle has its size.
    """

    def __init__(self, compiled: Compiled, program: Program, sizes: frozenset[int]) -> None:
        self._compiled, self._program, self._sizes = compiled, program, sizes

    def __call__(self, *args: Any) -> Any:
        """Run the graph.

        Raises:
            CacheHandleError: If handles come in that are not a whole cache of one call.
        """
        with inference():
            fixed_buffers.restore(args)
        held = (i for i, each in enumerate(args) if isinstance(each, Handle) and i not in self._sizes)
        kv = sorted({*self._program.other_kv_inputs, *held})
        if not _has_handles([args[i] for i in kv]):
            return self._compiled(*args)
        reasons = _reasons(self._program)
        with inference():
            try:
                inputs = _numbers_at(kv, args)
            except CacheHandleError as error:
                raise CacheHandleError(
                    f"{error} A graph that specache leaves alone was to get its numbers. {reasons}"
                ) from error
        _refuse_handles([inputs[i] for i in kv], self._program)  # a mere piece of one
        warn_once(
            logger,
            "specache gives a KV cache back, at 16 bits and on the device, to a graph that it leaves alone; it stays"
            f" there. {reasons}",
        )
        with overriding():
            return self._compiled(*inputs)


def _numbers_at(places: Sequence[int], args: Sequence[Any]) -> list[Any]:
    """The inputs of a call, with 16-bit pairs in place of the handles at these places."""
    inputs = list(args)
    for i, tensor in give_back([args[place] for place in places]).items():
        inputs[places[i]] = tensor
    return inputs


def _reasons(program: Program) -> str:
    return program.left_alone or " ".join(merged_messages(program.refusals)) or _NO_ATTENTION


def _has_handles(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor is a handle, a copy of one, or a piece of one."""
    if any(isinstance(tensor, Handle) for tensor in tensors):
        return True
    return registry.first_handle(tensors) is not None


def _refuse_handles(tensors: Sequence[torch.Tensor], program: Program) -> None:
    """No input that stays a tensor may be a handle."""
    if _has_handles(tensors):
        reasons = _reasons(program)
        raise CacheHandleError(
            "A KV cache that is managed by specache reached a graph that specache did not rewrite, and would be read as"
            f" numbers there. {reasons}"
        )


@contextlib.contextmanager
def bound_prompt_masks(session: Session, program: Program, args: Sequence[Any]) -> Iterator[None]:
    """While several tokens run: the session has the masks of their attentions."""
    session.prompt_masks = PromptMasks(program.prompt_masks, args)
    try:
        yield
    finally:
        session.prompt_masks = None


class Prefill:
    """Makes a session for every prompt."""

    def __init__(
        self, compiled: Compiled, program: Program, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._compiled, self._program, self._dtype, self._device = compiled, program, dtype, device
        assert program.outputs is not None
        self._plan = program.outputs

    def __call__(self, *args: Any) -> Any:
        """Run the prompt; the graph stores each layer's pairs on the way."""
        registry.sweep()
        with inference():
            session = registry.open_session(
                self._program.config, self._program.shapes, self._dtype, self._device
            )
            note_graph(session, self._program, args)
            try:
                with session.lock, bound_prompt_masks(session, self._program, args):
                    kept = self._compiled(*args, session.state)
                _advance(session, self._program, args)
                handles = registry.issue(session)
            except BaseException:
                session.close()  # nothing was handed out: give the memory back at once
                raise
            return assemble(self._plan, kept, handles, args)


def _advance(session: Session, program: Program, args: Sequence[Any]) -> None:
    """Note that a prompt or several tokens went through."""
    num_tokens = session.stored_length() - session.kv_len
    tokens = None if program.token is None else args[program.token]
    if tokens is not None and tokens.numel() != (session.batch or 0) * num_tokens:
        tokens = None  # several codes a token
    session.remember(None if tokens is None else tokens.reshape(-1, num_tokens))
    session.advance(num_tokens, decoded=False)


class GoesOn(ABC):
    """Continues the session that its inputs are the handles of."""

    def __init__(self, program: Program) -> None:
        assert program.outputs is not None
        self._program, self._plan, self._layers = program, program.outputs, program.shapes

    def __call__(self, *args: Any) -> Any:
        """Run the new tokens.

        Raises:
            CacheHandleError: If an input is a handle of something else, or one where there should be none.
            HostMemoryError: If a fork, or a cache that is taken over, doesn't fit.
        """
        with inference():
            args = tuple(self._in_this_form(args))
            past = [args[i] for i in self._program.past_inputs]
            _refuse_handles([args[i] for i in self._program.other_kv_inputs], self._program)
            if registry.first_handle(past) is None:
                session, past = self._take_over(past, args)
            else:
                session, past = claims.resolve(past, self._program.config, self._layers)
            registry.sweep()
            with session.lock:
                claims.check_open(session)  # another thread may have released it
                kept = self._run(session, args)
                handles = registry.resized(session, past)
            return assemble(self._plan, kept, handles, args)

    def _in_this_form(self, args: Sequence[Any]) -> Sequence[Any]:
        """A call's inputs, with 16-bit pairs in place of handles that are of this model and not of this graph.

        The layers of an untraced prompt are those of the model's cache. A graph may have them in another form, have
        some of them, or read some by itself.
        """
        past, others = self._program.past_inputs, self._program.other_kv_inputs
        session = registry.find(args[past[0]]) if past else None
        is_other = session is not None and session.shapes != self._layers
        wanted = [i for i in {*(past if is_other else ()), *others} if isinstance(args[i], Handle)]
        if not wanted:
            return args
        weights = [args[i] for i in self._program.weights]
        for each in (registry.find(args[i]) for i in wanted):
            if each is None or not (each.origin.layers_of_cache and each.origin.has(weights)):
                return args
        return _numbers_at(wanted, args)

    def _take_over(
        self, past: Sequence[torch.Tensor], args: Sequence[Any]
    ) -> tuple[Session, list[torch.Tensor]]:
        """A session for a cache of plain tensors: its prompt ran elsewhere, or in a graph that was left alone."""
        kv_len = claims.known_length(self._layers, past)
        if kv_len is None:
            raise CacheHandleError(
                "This past KV cache was made by a call that specache did not compile, and how many tokens it holds"
                " can't be told: each of its layers keeps a window, and all are full. Run the prompt with the compiled"
                " model."
            )
        if bool(torch.stack([tensor.isnan().any().to(past[0].device) for tensor in past]).any()):
            raise CacheHandleError(_NOT_NUMBERS)
        decoding = self._program.decoding
        session = registry.open_session(self._program.config, self._layers, past[0].dtype, past[0].device)
        note_graph(session, self._program, args)
        try:
            for i, mask in enumerate(() if decoding is None else decoding.masks.now(args)):
                take = session.key_mask.widen if i else session.key_mask.read
                take(mask[..., :-1], past[0].shape[0])
            for layer in range(len(self._layers)):
                # In an extend the graph's own store op tells the padding: until then nothing is quantised.
                session.store(
                    layer, past[2 * layer], past[2 * layer + 1], None, kv_len, hold=decoding is None
                )
            session.advance(kv_len, decoded=False)
            return session, registry.issue(session)
        except BaseException:
            session.close()
            raise

    @abstractmethod
    def _run(self, session: Session, args: Sequence[Any]) -> Sequence[Any]:
        """Put the tokens into the session, whose lock is held. Returns what the graph computes."""


class Extend(GoesOn):
    """Continues a session by several tokens at once, exactly."""

    def __init__(self, compiled: Compiled, program: Program) -> None:
        super().__init__(program)
        self._compiled = compiled

    def _run(self, session: Session, args: Sequence[Any]) -> Sequence[Any]:
        """Run the new tokens on the 16-bit history."""
        note_graph(session, self._program, args)
        session.forget_lookahead()
        padding = session.key_mask.at(session.kv_len)
        inputs = list(map(plain, args))
        with bound_prompt_masks(session, self._program, inputs):
            kept: Sequence[Any] = self._compiled(*inputs, session.state)
        _advance(session, self._program, args)
        if session.key_mask.shows(padding):
            session.requantize()
        return kept
