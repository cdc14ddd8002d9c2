"""`WorkerTransfer`: a thread copies beside compute, for rows that take time to read.

prefetch:  a job into the queue            the thread:  copies, tells the job's outcome
wait:      for that outcome; its error is raised once
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

from specache_fx.runtime.host_cache import HostCache
from specache_fx.runtime.transfer.base import CopyMetrics, SlotTransfer
from specache_fx.runtime.transfer.cpu import bring
from specache_fx.runtime.transfer.staging import Staging

Copy = Callable[[], tuple[int, int]]
"""Brings rows, and says how many came and how many were there."""

_EXIT_PATIENCE_S = 5.0


class Outcome:
    """What becomes of a copy, for the thread that waits for it.

    As `concurrent.futures.Future`, which takes several times as long to make, once a layer and step.
    """

    __slots__ = ("_error", "_running")

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """The copy is through, or failed with `error`. Called once, by the thread that copies."""
        self._error = error
        self._running.release()

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return not self._running.locked()

    def failed(self) -> bool:
        """Whether it is done, and `result` raises."""
        return self.done() and self._error is not None

    def wait(self) -> None:
        """Return when the copy is through."""
        with self._running:
            pass

    def result(self) -> None:
        """Return when the copy is through; raise what it failed with."""
        self.wait()
        if self._error is not None:
            raise self._error


class WorkerTransfer(SlotTransfer):
    """Copies on a thread of its own, which the first prefetch starts. Args as `SlotTransfer`."""

    def __init__(self, host: HostCache, top_k: int, device: torch.device) -> None:
        super().__init__(host, top_k, device)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._under_way: dict[int, Outcome] = {}  # by layer
        self._stop: weakref.finalize[..., WorkerTransfer] | None = None
        _workers.add(self)

    def _copy(self, layer: int, staging: Staging) -> Copy:
        """What the thread is to do. It holds host and slots, not the transfer: dropping that stops the thread."""
        return partial(bring, self.host, layer, staging)

    def prefetch_wanted(self, layer: int) -> None:
        """See `Transfer`."""
        staging = self.staging(layer)
        copy = self._copy(layer, staging)
        if self._stop is None:
            thread = threading.Thread(target=_work, args=(self._jobs,), name="specache-copy", daemon=True)
            thread.start()  # may fail: nobody waits for the copy yet
            # Runs at interpreter exit too: a daemon thread must not be inside of torch when Python goes away.
            self._stop = weakref.finalize(self, _stop_worker, self._jobs, thread)
        outcome = self._under_way[layer] = Outcome()
        self._jobs.put(partial(_run, copy, staging.row_bytes, self._metrics, outcome))
        if self.synchronous:
            outcome.wait()

    def _order(self, layer: int) -> None:
        outcome = self._under_way.get(layer)
        if outcome is None:
            return
        start = None if outcome.done() else time.perf_counter()
        try:
            outcome.result()
        finally:
            if outcome.done():  # else the wait was interrupted, and the copy is still writing
                del self._under_way[layer]
                if outcome.failed():  # what the slots hold is unknown
                    self.staging(layer).clear()
        if start is not None:
            self._metrics.waited_seconds += time.perf_counter() - start

    def _finish(self) -> None:
        for layer in list(self._under_way):
            with contextlib.suppress(Exception):
                self._order(layer)
        if self._stop is not None:
            self._stop()

    def pause(self) -> None:
        """Return when no copy is under way; what one failed with is left to `wait`."""
        for outcome in list(self._under_way.values()):
            outcome.wait()

    def forget_thread(self) -> None:
        """In a forked process, which lacks it: have the next copy start one."""
        self._jobs = SimpleQueue()
        if self._stop is not None:
            self._stop.detach()
        self._stop = None


_workers: weakref.WeakSet[WorkerTransfer] = weakref.WeakSet()


def _before_fork() -> None:
    for worker in list(_workers):
        worker.pause()


def _in_child() -> None:
    for worker in list(_workers):
        worker.forget_thread()


if hasattr(os, "register_at_fork"):
    # A forked process has no thread that copies: it gets no copy that is half made.
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)

_here = threading.local()


def copies_here() -> bool:
    """Whether this thread makes copies: it must wait for none, nor end a session, which waits for all of its own."""
    return getattr(_here, "copies", False)


def _run(copy: Copy, row_bytes: int, metrics: CopyMetrics, outcome: Outcome) -> None:
    start = time.perf_counter()
    try:
        came, stayed = copy()
    except BaseException as error:
        outcome.set(error)  # whoever waits empties the slots, and must not hang if a broken device can't
    else:
        metrics.count(came, stayed, row_bytes)
        metrics.copy_seconds += time.perf_counter() - start
        outcome.set()


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    _here.copies = True
    while (job := jobs.get()) is not None:
        job()
        del job  # else it would keep its session's memory until the next one


def _stop_worker(jobs: SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_PATIENCE_S)
