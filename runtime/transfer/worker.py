"""`WorkerTransfer`: a thread copies beside compute, for rows that take time to read.

prefetch:  a job for the thread; what it fails with empties the slots and is raised once, by who waits for it
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial

import torch

from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.transfer.base import CopyMetrics, Transfer
from specache_fx.runtime.transfer.cpu import bring
from specache_fx.runtime.transfer.staging import Staging

Copy = Callable[[], tuple[int, int]]
"""Brings rows, and says how many came and how many were there."""


class WorkerTransfer(Transfer):
    """Copies on a thread of its own, which the first prefetch starts. Args as `Transfer`."""

    def __init__(self, host: HostCache, top_k: int, device: torch.device) -> None:
        super().__init__(host, top_k, device)
        self._thread = _thread()
        self._under_way: dict[int, futures.Future[None]] = {}  # by layer

    def _copy(self, layer: int, staging: Staging) -> Copy:
        """The thread's job. It holds host and slots, not the transfer: dropping that ends the thread."""
        return partial(bring, self.host, layer, staging)

    def prefetch_wanted(self, layer: int) -> None:
        """See `Transfer`."""
        staging = self.staging(layer)
        copy = self._copy(layer, staging)
        count = partial(_count, copy, staging.row_bytes, self._metrics)
        try:
            job = self._under_way[layer] = self._thread.submit(count)
        except RuntimeError:  # the interpreter exits, and a daemon thread still generates
            count()
            return
        if self.synchronous:
            futures.wait([job])

    def _wait(self, layer: int) -> None:
        job = self._under_way.get(layer)
        if job is None:
            return
        start = time.perf_counter()
        try:
            job.result()
        finally:
            if job.done():  # else the wait was interrupted, and the copy is still writing
                del self._under_way[layer]
                if job.exception() is not None:  # the slots' content is unknown
                    self.staging(layer).clear()
        self._metrics.waited_seconds += time.perf_counter() - start

    def _shutdown(self) -> None:
        for layer in list(self._under_way):
            with contextlib.suppress(Exception):
                self._wait(layer)
        self._thread.shutdown()


_here = threading.local()


def _thread() -> futures.ThreadPoolExecutor:
    """Starts with its first job. The interpreter waits for that when it exits: torch must not go away beneath it."""
    return futures.ThreadPoolExecutor(1, "specache-copy", initializer=partial(setattr, _here, "copies", True))


def copies_here() -> bool:
    """Whether this thread makes copies: it must wait for none, nor end a session, which waits for all of its own."""
    return getattr(_here, "copies", False)


def _count(copy: Copy, row_bytes: int, metrics: CopyMetrics) -> None:
    start = time.perf_counter()
    metrics.count(*copy(), row_bytes)
    metrics.copy_seconds += time.perf_counter() - start
