"""Makes decode graphs in a thread, while the caller's thread decodes without them.

FX replaces `Module.__call__` for all threads while one of them traces, and Python hands its lock over each 5 ms: a step
has a thousand operators, each of which gives the lock away. Within `Background` FX's replacements hold for the thread
that traces, and the lock is handed over at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch.fx import _symbolic_trace

logger = logging.getLogger(__name__)
_SWITCH_SECONDS = 2e-5  # from thread to thread; 5e-3 is Python's
_EXIT_SECONDS = 20.0  # a compiler that runs can't be stopped
_one = threading.Lock()  # threads that trace
_threads: set[threading.Thread] = set()
_here = threading.local()


_FAILED = (
    "specache: the decode step can't be compiled: %s. Tokens go on coming from the uncompiled model, which reads the"
    ' 16-bit cache of one layer at a time. warm="block" raises the error where it happens'
)


class _Stop(BaseException):
    """The process ends."""


class Background:
    """Which kinds of steps have their graph. It makes those that have none.

    Args:
        strict: Raise what a graph fails with; else its steps go on without one.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._begun: set[Hashable] = set()
        self._ready: set[Hashable] = set()
        self._failed: dict[Hashable, Exception] = {}

    def has(self, kind: Hashable, prepare: Callable[[], Callable[[], None] | None]) -> bool:
        """Whether a kind of steps has its graph. At the first call with a kind, its graph begins to be made.

        Args:
            kind: A kind of steps.
            prepare: Called in this thread, at the first call. What it returns makes the graph, in another thread. None:
                the step makes it.

        Raises:
            Exception: What the graph failed with, if strict.
        """
        if kind in self._ready or getattr(_here, "waits", False):
            self._ready.add(kind)
            return True
        if kind not in self._begun:
            if (make := prepare()) is None:
                return True
            self._begun.add(kind)
            self._begin(kind, make)
        if self._strict and kind in self._failed:
            raise self._failed[kind]
        return False

    def _begin(self, kind: Hashable, make: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._make, args=(kind, make), daemon=True, name="specache-graphs")
        _threads.add(thread)
        thread.start()

    def _make(self, kind: Hashable, make: Callable[[], None]) -> None:
        try:
            with _one, _shared_interpreter():
                make()
            self._ready.add(kind)
        except Exception as error:
            self._failed[kind] = error
            if not self._strict:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
                logger.warning(_FAILED, reason)
        except _Stop:
            pass
        finally:
            _threads.discard(threading.current_thread())


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Within it, a first step of this thread waits for its graph."""
    before = getattr(_here, "waits", False)
    _here.waits = True
    try:
        yield
    finally:
        _here.waits = before


def _in_child() -> None:
    """A forked process has none of the threads."""
    _one._at_fork_reinit()  # type: ignore[attr-defined]
    _threads.clear()


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def _shared_interpreter() -> Iterator[None]:
    """While one thread traces and another runs the model."""
    usual: Any = _symbolic_trace._Patcher.patch_method
    seconds = sys.getswitchinterval()

    def patch_method(
        patcher: Any, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True
    ) -> None:
        thread, before = threading.get_ident(), getattr(cls, name)

        @functools.wraps(new)
        def of_thread(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == thread else before)(*args, **kwargs)

        usual(patcher, cls, name, of_thread, deduplicate)

    _symbolic_trace._Patcher.patch_method = patch_method  # type: ignore[assignment,method-assign]
    sys.setswitchinterval(min(seconds, _SWITCH_SECONDS))
    try:
        yield
    finally:
        _symbolic_trace._Patcher.patch_method = usual  # type: ignore[method-assign]
        sys.setswitchinterval(seconds)


@atexit.register
def _stop() -> None:
    """End threads that trace, before the interpreter takes their modules away."""
    for thread in list(_threads):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
    for thread in list(_threads):
        thread.join(_EXIT_SECONDS)
