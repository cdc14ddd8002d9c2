"""Hooks in Dynamo, for which torch (2.11 to 2.15) has no public interface.

`evaluates_flags`: once a prompt's length is dynamic, `is_causal=q_len > 1` is a symbolic bool. SDPA takes none: Dynamo
breaks the graph there, and skips the whole frame for ever where the call is in a loop. The hook makes it a bool under a
guard, as an `if` does. `torch.compiler.substitute_in_graph` would be the public way, and refuses functions that Dynamo
puts into graphs.

`watches_frames`: a frame that Dynamo skips runs uncompiled, and no backend is called. The hook calls `given_up` of the
backend that it was to be compiled with, where that has such a method. It takes back what `retrace` marks in
`torch.compiler.config.dynamic_sources` for a frame, and tells Dynamo of decode steps (`step_trace`).

`watches_breaks`: notes each break with Dynamo's reason (`graph_breaks`), which no backend gets.

`traces_alone`: while FX traces, it has replaced `Module.__call__` and `__getattr__` for all threads. The hook keeps
that to the thread that traces, so that another one can run a model. `traces_in_turn`: two threads that trace would take
each other's replacements back, so a trace waits for compiles of other threads.

None changes anything for another backend, but that the break of the first is gone there as well.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo import convert_frame, symbolic_convert, variables
from torch.fx import _symbolic_trace
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from specache_fx import graph_breaks
from specache_fx.compiled import backend_of
from specache_fx.step_trace import tracing

logger = logging.getLogger(__name__)
_OURS = "_is_of_specache"
_FLAGGED = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def evaluates_flags(table: Any) -> bool:
    """Have Dynamo evaluate symbolic bools among SDPA's arguments.

    Args:
        table: Dynamo's handlers of torch functions; a handler gets `(variable, tx, *args, **kwargs)`, and what it
            returns stands for the call. Where it returns None, Dynamo goes on as without one.

    Returns:
        Whether it could be done.
    """
    if not isinstance(table, dict) or not hasattr(
        getattr(variables, "SymNodeVariable", None), "evaluate_expr"
    ):
        return False
    for function in _FLAGGED:
        table.setdefault(function, _with_plain_flags)
    return True


def _with_plain_flags(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(map(_is_flag, (*args, *kwargs.values()))):
        return None
    plain = [_plain(each, tx) for each in args]
    return variable.call_function(tx, plain, {name: _plain(each, tx) for name, each in kwargs.items()})


def _is_flag(variable: Any) -> bool:
    """Whether an argument is a symbolic bool of sizes, which a guard can hold; one of data is left to Dynamo."""
    if not isinstance(variable, variables.SymNodeVariable):
        return False
    value = variable.sym_num
    return isinstance(value, torch.SymBool) and not free_unbacked_symbols(value)


def _plain(variable: Any, tx: Any) -> Any:
    return (
        variables.ConstantVariable.create(variable.evaluate_expr(tx.output))
        if _is_flag(variable)
        else variable
    )


def watches_frames(converter: Any) -> bool:
    """Call `given_up` of a backend for each frame that Dynamo gives up.

    Args:
        converter: Dynamo's class whose instances are called with a frame. They raise where Dynamo is to skip it.

    Returns:
        Whether it could be done.
    """

    def wrapped(convert: Any) -> Any:
        def watched(self: Any, frame: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
            marks: Any = torch.compiler.config
            sizes: Any = torch._dynamo.config
            static = sizes.force_parameter_static_shapes
            shown = tracing() if _is_ours(self) else contextlib.nullcontext()
            # `retrace` sets both, for this frame.
            kept = sizes.patch(force_parameter_static_shapes=static)
            with marks.patch(dynamic_sources=marks.dynamic_sources), kept, shown:
                try:
                    return convert(self, frame, *args, skip=skip + 1, **kwargs)
                except Exception as error:
                    _notify(self, frame, error)
                    raise

        return watched

    return _wrap(converter, "__call__", {"frame", "skip"}, wrapped)


def restores_marks() -> bool:
    """Whether `watches_frames` is in place, and takes back what is marked for a frame."""
    converter = getattr(convert_frame, "ConvertFrameAssert", None)
    return hasattr(getattr(converter, "__call__", None), _OURS)  # noqa: B004


def _backend(converter: Any) -> Any:
    """What a frame is compiled with, as the user gave it."""
    found = backend_of(converter)
    return getattr(found, "compiler_fn", found)


def _is_ours(converter: Any) -> bool:
    return hasattr(_backend(converter), "given_up")


def _notify(converter: Any, frame: Any, error: Exception) -> None:
    if _is_ours(converter):
        options = getattr(backend_of(converter), "kwargs", {}).get("options")
        _backend(converter).given_up(frame, error, options)


def watches_breaks(translator: Any) -> bool:
    """Have `graph_breaks` note each break.

    Args:
        translator: Dynamo's class that traces a frame, `f_code`, and logs each break with the line, `lineno`, at which
            it is and the exception that it had.

    Returns:
        Whether it could be done.
    """

    def wrapped(log: Any) -> Any:
        def watched(self: Any, code_options: Any, reason: str, exc: Exception) -> Any:
            graph_breaks.note(self.f_code, self.lineno, exc)
            return log(self, code_options, reason, exc)

        return watched

    return _wrap(translator, "log_graph_break", {"code_options", "reason", "exc"}, wrapped)


def traces_alone(patcher: Any) -> bool:
    """Keep what FX replaces while it traces to the thread that traces.

    Args:
        patcher: FX's class that replaces methods.

    Returns:
        Whether it could be done.
    """

    def wrapped(patch: Any) -> Any:
        def watched(self: Any, cls: type, name: str, new_fn: Any, *args: Any, **kwargs: Any) -> Any:
            mine, usual = threading.get_ident(), getattr(cls, name)

            @functools.wraps(new_fn)
            def here(*args: Any, **kwargs: Any) -> Any:
                return (new_fn if threading.get_ident() == mine else usual)(*args, **kwargs)

            return patch(self, cls, name, here, *args, **kwargs)

        return watched

    return _wrap(patcher, "patch_method", {"cls", "name", "new_fn"}, wrapped)


def traces_in_turn(tracer: Any) -> bool:
    """Have FX trace in one thread at a time.

    Dynamo's own lock does that: with another one, two threads could wait for each other.

    Args:
        tracer: FX's class that traces.

    Returns:
        Whether it could be done.
    """

    def wrapped(trace: Any) -> Any:
        def watched(self: Any, root: Any, *args: Any, **kwargs: Any) -> Any:
            with convert_frame.compile_lock:
                return trace(self, root, *args, **kwargs)

        return watched

    return _wrap(tracer, "trace", {"root"}, wrapped)


def _wrap(owner: Any, name: str, parameters: set[str], wrapped: Callable[[Any], Any]) -> bool:
    """Put `wrapped(method)` in a method's place, once, if it has these parameters."""
    method = getattr(owner, name, None)
    if method is None or not parameters.issubset(_parameters(method)):
        return False
    if not hasattr(method, _OURS):
        watched = functools.wraps(method)(wrapped(method))
        setattr(watched, _OURS, True)
        setattr(owner, name, watched)
    return True


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def install() -> None:
    """Put the hooks in place. Called by an import, under its lock: once, and before the first trace."""
    functions = getattr(variables, "TorchInGraphFunctionVariable", None)
    handlers = getattr(functions, "_get_handlers", None)
    table = None if handlers is None else handlers()
    if not evaluates_flags(table):
        logger.warning(
            "specache does not know how torch %s handles functions. Attention with is_causal=q_len > 1 is rewritten at"
            " the first prompt length alone. Write is_causal=True if q_len > 1 else False.",
            torch.__version__,
        )
    frames = watches_frames(getattr(convert_frame, "ConvertFrameAssert", None))
    if not frames or not watches_breaks(getattr(symbolic_convert, "InstructionTranslatorBase", None)):
        logger.warning(
            "specache does not know how torch %s breaks graphs. Attention that runs uncompiled behind a break gets no"
            ' warning. TORCH_LOGS="graph_breaks" shows breaks.',
            torch.__version__,
        )
    in_turn = traces_in_turn(getattr(_symbolic_trace, "Tracer", None))
    if not in_turn or not traces_alone(getattr(_symbolic_trace, "_Patcher", None)):
        logger.warning(
            "specache does not know how torch %s traces. While one thread compiles, models in others may fail.",
            torch.__version__,
        )
