"""`SharedCopy`: a layer's copies, made by the threads that compute.

A thread of its own, on a machine whose cores all compute, takes a core from them when the system lets it, and Python's
lock before and after. A thread of the next product of weights makes a copy in less than that costs, while the others
have begun to multiply.
"""

from __future__ import annotations

import ctypes
import weakref

from specache_fx.runtime.copy_job import CopyMetrics
from specache_fx.runtime.host_cache import HostCache
from specache_fx.runtime.native import copies
from specache_fx.runtime.staging import Staging
from specache_fx.runtime.tracing import record

_PENDING, _RUNNING = 1, 2  # `State` of copies.cpp


class SharedCopy:
    """As a `CopyJob` with its `Outcome`, for one layer, again and again.

    Args:
        library: What `copies.load()` gave.
        host: Where the rows come from; in memory.
        layer: Layer number.
        staging: The layer's slots, on the CPU.
        metrics: Counts the rows.
    """

    def __init__(
        self, library: ctypes.CDLL, host: HostCache, layer: int, staging: Staging, metrics: CopyMetrics
    ) -> None:
        self._library, self._host, self._layer, self._metrics = library, host, layer, metrics
        self._copy = copies.CopyC()
        function = ctypes.cast(library.specache_copy_start, ctypes.c_void_p).value
        assert function is not None
        self._starter = function, ctypes.addressof(self._copy)
        self._arguments = copies.StageArguments(staging.wanted, staging.slots, staging.rows, self._copy.stage)
        # Dropped while it is pending: what it reads and writes is there until nobody does. Not at exit, when nobody
        # makes copies any more: a forked process would wait for a thread that it does not have.
        weakref.finalize(self, _let_go, library, self._copy, self._arguments).atexit = False

    @property
    def starter(self) -> tuple[int, int]:
        """Addresses of a function that leaves what `staging.wanted` then names to the next product, and its argument.

        For C++ to call before the host's rows change; `result` is called once for each time.
        """
        blocks, starts = self._host.blocks(self._layer)
        self._arguments.of_host(blocks, starts, self._host.length(self._layer))
        return self._starter

    def start(self) -> None:
        """Leave what `staging.wanted` names to the next product."""
        self._library.specache_copy_start(self.starter[1])

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._copy.state not in (_PENDING, _RUNNING)

    def result(self) -> None:
        """Return when the copy is through, made here where no product has come; raise what it failed with.

        Called once for each `start`.
        """
        copy, stage = self._copy, self._copy.stage
        self._metrics.unclaimed += self._library.specache_copy_finish(self._starter[1])
        self._arguments.check(copy.failed, self._layer)
        self._metrics.count(stage.fetched, stage.kept, stage.row_bytes)
        self._metrics.copy_seconds += copy.stop - copy.start
        record("prefetch", "copies", copy.thread, copy.start, copy.stop, layer=self._layer)


def _let_go(library: ctypes.CDLL, copy: copies.CopyC, arguments: copies.StageArguments) -> None:
    library.specache_copy_finish(ctypes.addressof(copy))
