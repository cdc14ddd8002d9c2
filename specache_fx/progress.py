"""Says that a model is being traced or compiled, which may take a minute.

A terminal shows one line on stderr: the graph, the step and the seconds so far. It vanishes, and one with the time
stays. Elsewhere (a pipe, a notebook) the logger `specache_fx.progress` gets one warning, and the time at INFO. A level
above WARNING silences it. Compiles under `QUIET_SECONDS` are not reported, nor those of graphs that are left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from specache_fx.config import Lowering

logger = logging.getLogger(__name__)

QUIET_SECONDS = 3.0

_lock = threading.Lock()
_running: list[Compile] = []  # one at most: a display has one line
_muted: list[object] = []


_INDUCTOR = (
    "specache: compiling %s with Inductor, which can take a minute; later processes find most of it in Inductor's"
    ' cache. lowering="eager" compiles nothing'
)
_TRACE = (
    "specache: tracing %s, once for each kind of it in a process. specache_fx.warm_up() does that beforehand"
)


class Compile:
    """A compile that is under way, or a trace.

    Attributes:
        what: Name of the graph.
        step: The current step of the compile.
        thread: Who does it.
    """

    def __init__(self, what: str, *, is_trace: bool = False) -> None:
        self.what, self.step, self.thread = what, "", threading.get_ident()
        self._doing, self._done = ("tracing", "traced") if is_trace else ("compiling", "compiled")
        self._told = _TRACE if is_trace else _INDUCTOR
        self._begun = time.perf_counter()
        self._display: Any = None
        self._said, self._over = False, False
        self._lock = threading.RLock()
        self._timer = threading.Timer(QUIET_SECONDS, self._say)
        self._timer.daemon = True

    def start(self) -> None:
        """Begin to count the seconds."""
        self._begun = time.perf_counter()
        with contextlib.suppress(RuntimeError):  # no thread is to be had: a line less, and no failed compile
            self._timer.start()

    def _say(self) -> None:
        with self._lock:
            if self._over or _muted or not logger.isEnabledFor(logging.WARNING):
                return
            self._said = True
            # A stderr that is closed, gone, or no file at all is no failed compile.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if is_terminal():
                    display = _display(self)
                    display.start()
                    self._display = display
                    return
            with contextlib.suppress(ValueError):  # of logging's own, where stderr is closed
                logger.warning(self._told, self.what)

    def end(self, done: bool) -> None:
        """Take the line away; say how long it took if it is done."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._display is not None:
                with contextlib.suppress(OSError, ValueError):  # a terminal that is gone is no failed compile
                    self._display.stop()
                    if done:
                        told = f"specache: {self._done} {self.what} in {self._seconds:.0f} s"
                        self._display.console.print(told, highlight=False)
            elif self._said and done:
                logger.info("specache: %s %s in %.0f s", self._done, self.what, self._seconds)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._begun

    def __rich__(self) -> str:
        step = f": {self.step}" if self.step else ""
        return f"specache: {self._doing} {self.what}{step}, {self._seconds:.0f} s"


def is_terminal() -> bool:
    """Whether stderr is one that can take a line back, and no other display of rich's has it."""
    from rich.console import Console
    from rich.file_proxy import FileProxy

    return (
        sys.stderr is not None
        and sys.stderr.isatty()
        and not isinstance(sys.stderr, FileProxy)
        and not Console(stderr=True).is_dumb_terminal
    )


def _display(compile: Compile) -> Any:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_row(Spinner("dots"), compile)
    # The program's own stdout and stderr are restored.
    return Live(
        grid,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextlib.contextmanager
def announced(what: str, lowering: Lowering, num_layers: int = 0) -> Iterator[None]:
    """Say so while the block runs, if it takes long. Within another one, or without Inductor, nothing is said.

    Args:
        what: Name of the graph: "the prompt".
        lowering: How.
        num_layers: Layers of it that have a cache, 0 where that says nothing.
    """
    if num_layers:
        what = f"{what} ({num_layers} layer{'s' if num_layers > 1 else ''})"
    with _shown(Compile(what)) if lowering == "inductor" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def traced(what: str) -> Iterator[None]:
    """Say so while Dynamo traces a graph within the block, if it takes long."""
    with _shown(Compile(what, is_trace=True)):
        yield


@contextlib.contextmanager
def _shown(mine: Compile) -> Iterator[None]:
    with _lock:
        is_first = not _running
        if is_first:
            _running.append(mine)
    if not is_first:
        yield
        return
    mine.start()
    done = False
    try:
        yield
        done = True
    finally:
        _running.remove(mine)
        mine.end(done)


def say_step(step: str) -> None:
    """Name the current step, if this thread compiles anything."""
    for current in _running:
        if current.thread == threading.get_ident():
            current.step = step


def _in_child() -> None:
    """Forget the compiles of threads that a forked process does not have, and a lock that one of them held."""
    _lock._at_fork_reinit()  # type: ignore[attr-defined]
    _running[:] = [current for current in _running if current.thread == threading.get_ident()]


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Say nothing meanwhile: the terminal has another display."""
    mine = object()
    _muted.append(mine)
    try:
        yield
    finally:
        _muted.remove(mine)
