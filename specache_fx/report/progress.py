"""Says that a model is being traced or compiled, which may take a minute.

A terminal shows one line on stderr: the graph, the step and the seconds so far. It vanishes, and one with the time
stays. Elsewhere (a pipe, a notebook) the logger `specache_fx.report.progress` gets one warning, and the time at INFO. A
level above WARNING silences it. Compiles under `QUIET_SECONDS` are not reported, nor those of graphs left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from specache_fx.config import Lowering

logger = logging.getLogger(__name__)

QUIET_SECONDS = 3.0

_lock = threading.Lock()
_running: list[_Compile] = []  # one at most: a display has one line
_muted: list[object] = []


_INDUCTOR = (
    "specache: compiling %s with Inductor, which can take a minute; later processes find most of it in Inductor's"
    ' cache. lowering="eager" compiles nothing'
)
_TRACE = (
    "specache: tracing %s, once for each kind of it in a process. specache_fx.warm_up() does that beforehand"
)
_NO_STDERR = (
    OSError,
    ValueError,
    AttributeError,
)  # one that is closed, gone, or no file at all fails no compile


class _Compile:
    """A compile that is under way, or a trace, and the thread that shows it.

    Attributes:
        step: The current step of the compile.
        thread: Who does it.
    """

    def __init__(self, what: str, verb: str, notice: str) -> None:
        self.step, self.thread = "", threading.get_ident()
        self._what, self._verb, self._notice = what, verb, notice
        self._begun, self._is_done = time.perf_counter(), False
        self._over = threading.Event()
        self._shower = threading.Thread(target=self._show, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread is to be had: a line less, and no failed compile
            self._shower.start()

    def end(self, done: bool) -> None:
        """Take the line away; say how long it took if it is done."""
        self._is_done = done
        self._over.set()
        if self._shower.ident is not None:
            self._shower.join()

    def _show(self) -> None:
        if self._over.wait(QUIET_SECONDS) or _muted or not logger.isEnabledFor(logging.WARNING):
            return
        with contextlib.suppress(*_NO_STDERR):
            if _has_terminal():
                self._show_line()
                return
        with contextlib.suppress(ValueError):  # of logging's own, where stderr is closed
            logger.warning(self._notice, self._what)
        self._over.wait()
        if self._is_done:
            logger.info("%s", self._time)

    def _show_line(self) -> None:
        with _bar(bar_format="{desc}") as bar:
            while not self._over.wait(0.25):
                step = f": {self.step}" if self.step else ""
                bar.set_description_str(
                    f"specache: {self._verb}ing {self._what}{step}, {self._seconds:.0f} s"
                )
            bar.set_description_str(self._time)
            bar.leave = self._is_done

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def _time(self) -> str:
        return f"specache: {self._verb}ed {self._what} in {self._seconds:.0f} s"


def _has_terminal() -> bool:
    """Whether stderr is one that can take a line back, and no display of rich's has it."""
    is_taken = type(sys.stderr).__module__.startswith("rich.")
    return sys.stderr.isatty() and not is_taken and os.environ.get("TERM") not in ("dumb", "unknown")


def _bar(**options: Any) -> Any:
    """A bar of tqdm's on stderr, which vanishes, without a thread of tqdm's."""
    from tqdm.std import tqdm

    bar = type("_Bar", (tqdm,), {"monitor_interval": 0})
    columns, lines = shutil.get_terminal_size()  # tqdm takes a size of 0 as it is
    return bar(file=sys.stderr, leave=False, ncols=columns - 1, nrows=lines, **options)


@contextlib.contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show how many of some parts are done, and no compile meanwhile.

    Args:
        what: Name of them all.
        total: How many.

    Yields:
        Called with a name at the begin of each: it shows a bar in a terminal, else it logs at INFO.
    """
    if sys.stderr is None or not _has_terminal():
        yield lambda name: logger.info("specache: %s: %s", what, name)
        return
    with muted(), _bar(total=total, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}") as bar:
        done = itertools.count()

        def advance(name: str) -> None:
            bar.n = next(done)
            bar.set_description_str(f"specache: {what}: {name}")

        yield advance


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
    with _shown(what, "compil", _INDUCTOR) if lowering == "inductor" else contextlib.nullcontext():
        yield


def traced(what: str) -> contextlib.AbstractContextManager[None]:
    """Say so while Dynamo traces a graph within the block, if it takes long."""
    return _shown(what, "trac", _TRACE)


@contextlib.contextmanager
def _shown(*args: str) -> Iterator[None]:
    with _lock:
        mine = None if _running else _Compile(*args)
        if mine is not None:
            _running.append(mine)
    if mine is None:
        yield
        return
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
