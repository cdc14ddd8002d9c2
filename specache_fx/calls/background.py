"""Makes decode graphs in a thread, while the caller's thread decodes without them.

A step has a thousand operators. Each releases Python's lock, and the thread that traces keeps it for up to 5 ms then.
So threads switch after 20 us while a graph is made.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch.fx import _symbolic_trace

from specache_fx._log import warn_once
from specache_fx.calls.this_thread import having, here
from specache_fx.errors import SpecacheError, first_line
from specache_fx.resets import on_reset

logger = logging.getLogger(__name__)
_SWITCH_SECONDS = 2e-5
_EXIT_SECONDS = 20.0  # a compiler that runs can't be stopped
# Dynamo sets the state of a trace's begin when the trace ends. The caller would draw its numbers a second time.
_SETTERS: tuple[tuple[Any, str], ...] = (
    (torch.random, "set_rng_state"),
    (torch.cuda, "set_rng_state"),
    (random, "setstate"),
)
_FAILED = (
    "the decode step can't be compiled: {}. Tokens go on coming from the uncompiled model, with the 16-bit pairs of one"
    ' layer at a time. warm="block" raises the error where it happens.'
)


class _Stop(BaseException):
    """The process ends."""


class _Threads:
    """The thread that makes a graph: one at a time."""

    def __init__(self) -> None:
        self._newest: threading.Thread | None = None
        self._lock = threading.Lock()
        self._undo = contextlib.ExitStack()

    @property
    def are_running(self) -> bool:
        """Whether a graph is being made."""
        return self._newest is not None and self._newest.is_alive()

    def begin(self, make: Callable[[], None]) -> None:
        """Start a thread that calls `make`, where no other one runs."""
        with self._lock:
            if self.are_running:
                return
            state = contextvars.copy_context(), torch.get_num_threads()  # torch's settings
            thread = threading.Thread(
                target=self._run, args=(make, *state), daemon=True, name="specache-graph"
            )
            thread.start()
            self._newest = thread

    def join(self) -> None:
        """Wait until no graph is made."""
        while (thread := self._newest) is not None and thread.is_alive():
            thread.join()

    def _run(self, make: Callable[[], None], context: contextvars.Context, num_threads: int) -> None:
        if torch.get_num_threads() != num_threads:  # this thread's own, which the first question sets
            torch.set_num_threads(num_threads)  # a graph is for so many
        with contextlib.suppress(_Stop), self._undo, having(waits=True):
            self._undo.enter_context(_state_of_others())
            with compile_lock:  # a graph can't run while FX traces in another thread
                context.run(make)

    def stop(self) -> None:
        """End the thread before the interpreter takes its modules away."""
        if (thread := self._newest) is None or not thread.is_alive():
            return
        identity = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(_Stop))
        thread.join(_EXIT_SECONDS)

    def leave_to_parent(self) -> None:
        """In a forked process there is no such thread; what it had changed and locked is as before."""
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]
        if self._newest is None or self.are_running:
            return
        self._undo.close()
        self._newest = None
        if _symbolic_trace.CURRENT_PATCHER is not None:
            _symbolic_trace.CURRENT_PATCHER.revert_all_patches()
            _symbolic_trace.CURRENT_PATCHER = None
        _symbolic_trace._is_fx_tracing_flag = torch.compiler._is_compiling_flag = False
        compile_lock._at_fork_reinit()  # type: ignore[attr-defined]


threads = _Threads()


class Background:
    """Which kinds of steps have their graph. It makes those that have none.

    Args:
        strict: Raise what a graph fails with; else its steps go on without one.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._made: dict[Hashable, Exception | None] = {}  # kinds with a graph; or what it failed with
        on_reset(self.forget)

    def is_ready(self, kind: Hashable, prepare: Callable[[], Callable[[], None] | None]) -> bool:
        """Whether a step of this kind runs as a graph; if not, its graph begins to be made.

        Args:
            kind: A kind of steps.
            prepare: Prepares the graph, in this thread. What it returns makes it, in another one. It returns None, or
                raises, where that can't be: the step makes its graph then.

        Raises:
            Exception: What the graph failed with: an error of this package, and if strict any.
        """
        if here.waits:
            self._made[kind] = None
        if kind in self._made:
            error = self._made[kind]
            if error is not None and (self._strict or isinstance(error, SpecacheError)):
                raise error.with_traceback(None)
            return error is None
        if threads.are_running:
            return False
        try:
            make = prepare()
            if make is not None:
                threads.begin(functools.partial(self._make, kind, make))
        except Exception as error:  # no copy of the cache, no memory, no thread
            logger.debug("No graph is made in the background.", exc_info=error)
            make = None
        if make is None:
            self._made[kind] = None
        return make is None

    def _make(self, kind: Hashable, make: Callable[[], None]) -> None:
        try:
            make()
            self._made[kind] = None
        except Exception as error:
            error.__context__ = error.__cause__ = None  # their frames hold the model
            self._made[kind] = error.with_traceback(None)
            if not self._strict and not isinstance(error, SpecacheError):
                warn_once(logger, _FAILED.format(first_line(error)))

    def forget(self) -> None:
        """Forget which graphs there are: Dynamo has."""
        self._made.clear()


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Within it, this thread leaves a core to the one that makes a graph, if there is one.

    Threads of a parallel region wait for each other. With as many of them as cores, each region would wait for a core.
    """
    count = torch.get_num_threads() if threads.are_running else 1
    if count == 1:
        yield
        return
    torch.set_num_threads(count - 1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@contextlib.contextmanager
def _state_of_others() -> Iterator[None]:
    """Threads switch soon, and this one sets no random state, which is the process's."""
    mine, seconds = threading.get_ident(), sys.getswitchinterval()
    with contextlib.ExitStack() as stack:
        for owner, name in _SETTERS:
            usual = getattr(owner, name)

            @functools.wraps(usual)
            def of_others(*args: Any, usual: Any = usual, **kwargs: Any) -> Any:
                return None if threading.get_ident() == mine else usual(*args, **kwargs)

            setattr(owner, name, of_others)
            stack.callback(setattr, owner, name, usual)
        sys.setswitchinterval(min(seconds, _SWITCH_SECONDS))
        stack.callback(sys.setswitchinterval, seconds)
        yield


atexit.register(threads.stop)
os.register_at_fork(after_in_child=threads.leave_to_parent)
