"""`SharedCopy`: a layer's copies in C++, made by the threads that compute, or by one of their own.

A thread of its own, on a machine whose cores all compute, takes a core from them when the system lets it. A thread of
the next product of weights makes a copy in less than that costs, while the others have begun to multiply. So the former
is for what takes longer than a product, rows in files, and for where no product comes.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable

from specache_fx.runtime.copy_job import CopyMetrics
from specache_fx.runtime.host_cache import HostCache
from specache_fx.runtime.native import copies
from specache_fx.runtime.staging import Staging
from specache_fx.runtime.tracing import record, will_record

_IDLE, _PENDING, _RUNNING = 0, 1, 2  # `State` of copies.cpp
_MADE_HERE, _NOT_YET = 1, 2  # what `specache_copy_finish` returns
_WAIT_S = 0.05  # so often Python sees signals while it waits
EXIT_PATIENCE_S = 5.0


class CopyMakers:
    """Who makes the copies of one engine, all its layers'.

    Args:
        library: What `copies.load()` gave.
        host: Where the rows come from.

    Attributes:
        library: See above.
        host: See above.
    """

    def __init__(self, library: ctypes.CDLL, host: HostCache) -> None:
        self.library, self.host = library, host
        self._by_thread, self._unclaimed = not host.in_memory, 0
        self._queue: copies.QueueC | None = None
        self._end: Callable[[], object] | None = None

    def queue(self) -> int | None:
        """Address of the thread's queue, with its thread running; None to leave copies to the next product."""
        if not self._by_thread:
            return None
        if self._queue is None:
            queue = copies.QueueC()
            serve = self.library.specache_copies_serve
            thread = threading.Thread(
                target=lambda: serve(ctypes.addressof(queue)), name="specache-copy", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads are to be had: who waits makes the copies
                return None
            self._queue = queue
            # Runs at interpreter exit too: a daemon thread must not be inside of a copy when Python goes away.
            self._end = weakref.finalize(self, _end, self.library, queue, thread)
        return ctypes.addressof(self._queue)

    def made(self, *, unclaimed: bool) -> None:
        """A copy that was left to a product is through; `unclaimed`: none came, and who waits has made it.

        A step that fails leaves one behind. Two in a row: no products come.
        """
        self._unclaimed = self._unclaimed + 1 if unclaimed else 0
        self._by_thread |= self._unclaimed == 2

    def close(self) -> None:
        """End the thread, if there is one. Nothing may be pending, or be started again."""
        if self._end is not None:
            self._end()


class SharedCopy:
    """As a `CopyJob` with its `Outcome`, for one layer, again and again.

    Args:
        makers: Who makes it.
        layer: Layer number.
        staging: The layer's slots, on the CPU.
        metrics: Counts the rows.
    """

    def __init__(self, makers: CopyMakers, layer: int, staging: Staging, metrics: CopyMetrics) -> None:
        self._makers, self._layer, self._metrics = makers, layer, metrics
        self._library = makers.library
        self._copy = copies.CopyC()
        function = ctypes.cast(self._library.specache_copy_start, ctypes.c_void_p).value
        assert function is not None
        self._starter = function, ctypes.addressof(self._copy)
        self._arguments = copies.StageArguments(staging.wanted, staging.slots, staging.rows, self._copy.stage)
        # Dropped while it is pending: what it reads and writes is there until nobody does.
        weakref.finalize(self, _let_go, self._library, self._copy, (self._arguments, makers))
        self._recorded = False
        will_record(self)

    @property
    def starter(self) -> tuple[int, int]:
        """Addresses of a function that starts the copy of what `staging.wanted` then names, and its argument.

        For C++ to call before the host's rows change, once. The last copy is through, and whoever may start this one
        has noted that `result` is to be called: an interrupt may come as soon as it is started.
        """
        assert self.done()
        host = self._makers.host
        self._copy.queue = self._makers.queue()
        self._arguments.of_host(*host.blocks(self._layer), host.length(self._layer))
        return self._starter

    def start(self) -> None:
        """Start to copy what `staging.wanted` names."""
        self._library.specache_copy_start(self.starter[1])

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._copy.state not in (_PENDING, _RUNNING)

    def result(self) -> None:
        """Return when the copy is through, made here where nobody has begun it; raise what it failed with, once.

        Does nothing where none was started.
        """
        copy, stage = self._copy, self._copy.stage
        how = _finish(self._library, copy)
        if copy.state == _IDLE:
            return
        self._record()
        copy.state, self._recorded = _IDLE, False
        if copy.queue is None:
            self._makers.made(unclaimed=how == _MADE_HERE)
        self._arguments.check(copy.failed, self._layer)
        self._metrics.count(stage.fetched, stage.kept, stage.row_bytes)
        self._metrics.copy_seconds += copy.stop - copy.start

    def record(self) -> None:
        """Have a trace show the copy that was started last, once: when it is waited for, or when the trace ends."""
        _finish(self._library, self._copy)
        if self._copy.state != _IDLE:
            self._record()

    def _record(self) -> None:
        if not self._recorded:
            copy, self._recorded = self._copy, True
            record("prefetch", "copies", copy.thread, copy.start, copy.stop, layer=self._layer)


def _finish(library: ctypes.CDLL, copy: copies.CopyC) -> int:
    """Return when a copy is through, with what C++ says of who made it."""
    while (how := library.specache_copy_finish(ctypes.addressof(copy), _WAIT_S)) == _NOT_YET:
        pass
    return int(how)


def _let_go(library: ctypes.CDLL, copy: copies.CopyC, _: object) -> None:
    _finish(library, copy)


def _end(library: ctypes.CDLL, queue: copies.QueueC, thread: threading.Thread) -> None:
    library.specache_copies_end(ctypes.addressof(queue))
    if thread is not threading.current_thread():
        thread.join(EXIT_PATIENCE_S)
