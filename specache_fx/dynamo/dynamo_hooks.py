"""Hooks in Dynamo, for which torch (2.11 to 2.15) has no public interface.

`evaluates_flags`: once a prompt's length is dynamic, `is_causal=q_len > 1` is a symbolic bool. SDPA takes none: Dynamo
breaks the graph there, and skips the whole frame for ever where the call is in a loop. The hook makes it a bool under a
guard, as an `if` does. `torch.compiler.substitute_in_graph` would be the public way, and refuses functions that Dynamo
puts into graphs.

`_watch_frames`: a frame that Dynamo skips runs uncompiled, and no backend is called. The hook calls `given_up` of the
backend that it was to be compiled with, where that has such a method. It takes back what `retrace` marks in
`torch.compiler.config.dynamic_sources` for a frame, and tells Dynamo of decode steps (`this_thread`). Past
`recompile_limit` Dynamo runs code uncompiled, on handles: the limit doesn't hold for code that this backend compiles.

`_watch_breaks`: notes each break with Dynamo's reason (`graph_breaks`), which no backend gets.

`_trace_alone`: while FX traces, it has replaced `Module.__call__` and `__getattr__` for all threads. The hook keeps
that to the thread that traces, so that another one can run a model. `_trace_in_turn`: two threads that trace would take
each other's replacements back, so a trace waits for compiles of other threads.

None changes anything for another backend, but that the break of the first is gone there as well.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch._dynamo import convert_frame, symbolic_convert, variables
from torch.fx import _symbolic_trace
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from specache_fx.calls.this_thread import having, tracing
from specache_fx.compiled import backend_of
from specache_fx.dynamo import graph_breaks

logger = logging.getLogger(__name__)
_OURS = "_is_of_specache"
_compiled: weakref.WeakSet[CodeType] = weakref.WeakSet()  # code that this backend compiles
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
    evaluates = hasattr(getattr(variables, "SymNodeVariable", None), "evaluate_expr")
    if not table or not isinstance(table, dict) or not evaluates:
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


class Hook(NamedTuple):
    """What stands around a method of torch's.

    Attributes:
        owner: Its class; None where this torch has none.
        method: Its name.
        parameters: Names of parameters that it has to have.
        around: Makes the new method of it.
        otherwise: What to say where it does not fit.
    """

    owner: Any
    method: str
    parameters: set[str]
    around: Callable[[Any], Any]
    otherwise: str

    def put(self) -> bool:
        """Put it in place, once. Returns whether it fits."""
        method = getattr(self.owner, self.method, None)
        if method is None or not self.parameters.issubset(_parameters(method)):
            return False
        if not hasattr(method, _OURS):
            watched = functools.wraps(method)(self.around(method))
            setattr(watched, _OURS, True)
            setattr(self.owner, self.method, watched)
        return True


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _watch_frames(convert: Any) -> Any:
    def watched(self: Any, frame: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
        backend, options = backend_of(self)
        is_ours = hasattr(backend, "given_up")
        with _settings(frame.f_code, is_ours=is_ours), contextlib.ExitStack() as noted:
            if is_ours:
                noted.enter_context(having(frame=frame))
                noted.enter_context(tracing())
            try:
                return convert(self, frame, *args, skip=skip + 1, **kwargs)
            except Exception as error:
                if is_ours:
                    backend.given_up(frame, error, options)
                raise

    return watched


@contextlib.contextmanager
def _settings(code: CodeType, *, is_ours: bool) -> Iterator[None]:
    """While Dynamo converts a frame: what `retrace` sets holds for that one.

    No `recompile_limit` for code of this backend, whoever compiles it, but Dynamo's limit of all compiles. Before a
    graph is rewritten no handle can meet uncompiled code, and the limit holds.
    """
    if is_ours:
        _compiled.add(code)
    marks, sizes = cast(Any, torch.compiler.config), cast(Any, torch._dynamo.config)
    kept = {"force_parameter_static_shapes": sizes.force_parameter_static_shapes}
    if code in _compiled and graph_breaks.has_rewritten():
        kept["recompile_limit"] = sizes.accumulated_recompile_limit
    with marks.patch(dynamic_sources=marks.dynamic_sources), sizes.patch(**kept):
        yield


def _watch_breaks(log: Any) -> Any:
    def watched(self: Any, code_options: Any, reason: str, exc: Exception) -> Any:
        graph_breaks.note(self.f_code, self.lineno, exc)
        return log(self, code_options, reason, exc)

    return watched


def _trace_alone(patch: Any) -> Any:
    def watched(self: Any, cls: type, name: str, new_fn: Any, *args: Any, **kwargs: Any) -> Any:
        mine, usual = threading.get_ident(), getattr(cls, name)

        @functools.wraps(new_fn)
        def here(*args: Any, **kwargs: Any) -> Any:
            return (new_fn if threading.get_ident() == mine else usual)(*args, **kwargs)

        return patch(self, cls, name, here, *args, **kwargs)

    return watched


def _trace_in_turn(trace: Any) -> Any:
    def watched(self: Any, root: Any, *args: Any, **kwargs: Any) -> Any:
        with (
            convert_frame.compile_lock
        ):  # Dynamo's own: with another one, two threads could wait for each other
            return trace(self, root, *args, **kwargs)

    return watched


_BREAKS = (
    "breaks graphs. Attention that runs uncompiled behind a break gets no warning."
    ' TORCH_LOGS="graph_breaks" shows breaks.'
)
_TRACES = "traces. While one thread compiles, models in others may fail."
FRAMES = Hook(
    getattr(convert_frame, "ConvertFrameAssert", None), "__call__", {"frame", "skip"}, _watch_frames, _BREAKS
)
BREAKS = Hook(
    getattr(symbolic_convert, "InstructionTranslatorBase", None),
    "log_graph_break",
    {"code_options", "reason", "exc"},
    _watch_breaks,
    _BREAKS,
)
_HOOKS = (
    FRAMES,
    BREAKS,
    Hook(getattr(_symbolic_trace, "Tracer", None), "trace", {"root"}, _trace_in_turn, _TRACES),
    Hook(
        getattr(_symbolic_trace, "_Patcher", None),
        "patch_method",
        {"cls", "name", "new_fn"},
        _trace_alone,
        _TRACES,
    ),
)


def restores_marks() -> bool:
    """Whether the hook that takes back what is marked for a frame is in place."""
    return hasattr(getattr(FRAMES.owner, "__call__", None), _OURS)  # noqa: B004


def install() -> None:
    """Put the hooks in place. Called by an import, under its lock: once, and before the first trace."""
    handlers = getattr(getattr(variables, "TorchInGraphFunctionVariable", None), "_get_handlers", dict)
    misfits = [hook.otherwise for hook in _HOOKS if not hook.put()]
    if not evaluates_flags(handlers()):
        misfits.append(
            "handles functions. Attention with is_causal=q_len > 1 is rewritten at the first prompt length alone. Write"
            " is_causal=True if q_len > 1 else False."
        )
    for otherwise in dict.fromkeys(misfits):
        logger.warning("specache does not know how torch %s %s", torch.__version__, otherwise)
