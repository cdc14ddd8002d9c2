"""`CopyEngine`: brings chosen 16-bit rows from the host to a layer's staging slots, beside compute.

A layer has one set of slots, not two. In a step the order for layer i is: wait, attention (which reads the
slots), selection, prefetch (which overwrites them). The next read is behind the next step's wait, so a copy
never meets a reader. On the CPU a copy starts when attention has returned; on CUDA the copy stream first
waits for an event that is recorded behind attention.

Three ways lead there. Where the device reads the host's rows by itself (CUDA, page-locked memory, Triton), two kernels
on a side stream do everything (`device_copy`). Where it is the CPU, C++ does, in the threads of the next product or in
one of its own (`shared_copy`). Else a thread of Python's gathers the rows (`copy_job`).

Paper: SpeCache §3.3, Alg. 3 (the top-k pairs of the next step are prefetched while this one computes).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from specache_fx.errors import SpecacheError
from specache_fx.runtime import device_copy
from specache_fx.runtime.copy_job import CopyJob, CopyMetrics
from specache_fx.runtime.host_cache import HostCache
from specache_fx.runtime.native import copies
from specache_fx.runtime.shared_copy import EXIT_PATIENCE_S, CopyMakers, SharedCopy
from specache_fx.runtime.staging import Outcome, Staging

__all__ = ["CopyEngine", "CopyMetrics"]


class CopyEngine:
    """The copies of one session: `prefetch` starts one, `wait` orders what reads its rows behind it.

    A layer's copies are made in the order of its prefetches. Not locked: one thread calls the methods.

    Args:
        host: Where the rows come from.
        top_k: Slots for each layer, batch row and kv head.
        device: Where the rows go.
        synchronous: Copy within `prefetch`, on the caller's thread (law 3 compares the two).
        delay: Called before each copy on the thread that copies (or launches the copy); for tests.
        on_device: Let the device copy by itself; by default where it can.
    """

    def __init__(
        self,
        host: HostCache,
        top_k: int,
        device: torch.device,
        *,
        synchronous: bool = False,
        delay: Callable[[], None] | None = None,
        on_device: bool | None = None,
    ) -> None:
        self._metrics = CopyMetrics()
        self._host, self._top_k, self._device = host, top_k, device
        self._synchronous, self._delay = synchronous, delay
        self._staging: dict[int, Staging] = {}
        self._shared: dict[int, SharedCopy] = {}
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stop: Callable[[], object] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        on_device = device_copy.runs(host, device) if on_device is None else on_device
        self._on_device = device_copy.DeviceCopy(host, device) if on_device else None
        if self._on_device is not None and self._stream is not None:
            # Dropped without `close`: what the kernels read and write must not be given to others meanwhile.
            weakref.finalize(self, self._stream.synchronize).atexit = False
        plain = device.type == "cpu" and self._on_device is None and not synchronous and delay is None
        library = copies.load() if plain else None
        self._makers = None if library is None else CopyMakers(library, host)
        self._closed = False

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: the staging slots, and what the device needs to fill them by itself."""
        own = 0 if self._on_device is None else self._on_device.nbytes
        return own + sum(staging.nbytes for staging in self._staging.values())

    @property
    def metrics(self) -> CopyMetrics:
        """What was copied; up to date for a layer after its `wait`. Reads the device's counters where it copies.

        Raises:
            SpecacheError: If the device was asked for a token that the host does not hold.
        """
        if self._on_device is None:
            return self._metrics
        if self._stream is not None:
            self._stream.synchronize()
        total = CopyMetrics()
        for layer in self._on_device.layers():
            rows = self._staging[layer].rows
            total.count(*self._on_device.count(layer), rows.shape[3] * rows.element_size())
        return total

    def prefetch(self, layer: int, indices: torch.Tensor) -> None:
        """Start to bring rows to the layer's slots. Rows that are there stay in their slots and are not
        copied.

        Args:
            layer: Layer number.
            indices: int32 `[batch, num_kv_heads, top_k]` on the device: tokens that the host holds, unique in
                a row; -1 is none. The caller may overwrite it at once.
        """
        if self._closed:
            raise SpecacheError("This copy engine is closed: its session has ended.")
        staging = self._of(layer)
        staging.join()
        if self._on_device is not None and staging.done is not None:
            torch.cuda.current_stream(self._device).wait_event(
                staging.done
            )  # it may still read what was wanted
        # A copy of our own: a compiled graph reuses the caller's buffer without asking.
        staging.wanted.copy_(indices)
        self._start(layer, staging)

    def wanted(self, layer: int) -> torch.Tensor | None:
        """Where C++ is to write the indices for the copy that `shared` gives; None where only `prefetch` goes.

        After the layer's `wait`: until then the last ones are being read.
        """
        return self._of(layer).wanted if self._device.type == "cpu" and not self._closed else None

    def is_copying(self, layer: int) -> bool:
        """Whether `wait` would wait."""
        job = self._of(layer).job
        return job is not None and not job.done()

    def shared(self, layer: int) -> SharedCopy | None:
        """The layer's next copy where C++ makes it, which it may also start (`SharedCopy.starter`); else None.

        After the layer's `wait`.
        """
        if self._makers is None:
            return None
        if layer not in self._shared:
            self._shared[layer] = SharedCopy(self._makers, layer, self._of(layer), self._metrics)
        return self._shared[layer]

    def expect(self, layer: int) -> SharedCopy:
        """The copy that `shared` gives, which may be started from now on, or not: what comes next waits for it."""
        shared = self._of(layer).job = self._shared[layer]
        return shared

    def _start(self, layer: int, staging: Staging) -> None:
        if self._on_device is not None:
            self._launch(self._on_device, layer, staging)
            return
        if self.shared(layer) is not None:
            self.expect(layer).start()
            return
        selected = None
        if self._stream is not None:
            selected = torch.cuda.Event()
            selected.record(torch.cuda.current_stream(self._device))
        if self._stop is None and not self._synchronous:
            thread = threading.Thread(target=_work, args=(self._jobs,), name="specache-copy", daemon=True)
            thread.start()  # may fail: nobody waits for the copy yet
            # Runs at interpreter exit too: a daemon thread must not be inside of torch when Python goes away.
            self._stop = weakref.finalize(self, _stop_worker, self._jobs, thread)
        outcome = staging.job = Outcome()
        # What the job holds keeps host and slots alive, not the engine: dropping the engine then stops its
        # thread.
        job = CopyJob(
            host=self._host,
            layer=layer,
            staging=staging,
            metrics=self._metrics,
            outcome=outcome,
            delay=self._delay,
            stream=self._stream,
            selected=selected,
        )
        if self._synchronous:
            job()
        else:
            self._jobs.put(job)

    def _launch(self, device_copies: device_copy.DeviceCopy, layer: int, staging: Staging) -> None:
        """Let the device plan and copy, behind what the current stream has been given so far."""
        if self._delay is not None:
            self._delay()
        if self._stream is None:
            device_copies.copy(layer, staging)
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            device_copies.copy(layer, staging)
            staging.done = staging.done or torch.cuda.Event()
            staging.done.record(self._stream)
        if self._synchronous:
            current.wait_event(staging.done)

    def wait(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Order what comes next on the current stream (or thread) behind the layer's last prefetch.

        Returns:
            rows `[batch, num_kv_heads, top_k, key_dim + value_dim]` and indices int32 `[batch, num_kv_heads,
            top_k]`, on the device, valid until the layer's next prefetch. An empty slot has index -1, and a
            row that means nothing. All are empty before the first prefetch.

        Raises:
            Exception: Whatever the copy failed with, once; the slots are empty then.
        """
        staging = self._of(layer)
        if self.is_copying(layer):
            start = time.perf_counter()
            staging.join()
            self._metrics.waited_seconds += time.perf_counter() - start
        else:
            staging.join()
        if staging.done is not None:
            torch.cuda.current_stream(self._device).wait_event(staging.done)
        return staging.rows, staging.indices

    def reset(self, layer: int) -> None:
        """Empty the layer's slots: the tokens there are about to change (crop, extend).

        Raises:
            Exception: As `wait`.
        """
        if layer in self._staging:
            self._settle(layer)
            self._staging[layer].clear()

    def reorder(self, batch_rows: torch.Tensor) -> None:
        """Reorder the batch rows of every layer's slots: row i becomes a copy of row `batch_rows[i]`.

        Args:
            batch_rows: int64 `[batch]` on the device.

        Raises:
            Exception: As `wait`.
        """
        for layer, staging in self._staging.items():
            self._settle(layer)
            staging.reorder(batch_rows)

    def _settle(self, layer: int) -> None:
        """As `wait`, and the host's rows may change afterwards: nothing reads them any more."""
        self.wait(layer)
        done = self._staging[layer].done
        if self._on_device is not None and done is not None:
            done.synchronize()

    def close(self) -> None:
        """Wait for the copies under way, then let go of thread and slots; twice is fine. Errors end here."""
        self._closed = True
        for staging in self._staging.values():
            with contextlib.suppress(Exception):
                staging.join()
        if self._stop is not None:
            self._stop()
        if self._makers is not None:
            self._makers.close()
        if self._stream is not None:
            self._stream.synchronize()
        self._staging.clear()
        self._shared.clear()

    def _of(self, layer: int) -> Staging:
        if layer not in self._staging:
            num_kv_heads, key_dim, value_dim = self._host.shapes[layer]
            shape = (self._host.batch, num_kv_heads, self._top_k)
            row_dim = key_dim + value_dim
            self._staging[layer] = Staging.empty(shape, row_dim, self._host.dtype, self._device)
        return self._staging[layer]


_here = threading.local()


def copies_here() -> bool:
    """Whether this thread makes copies: it must wait for none, nor end a session, which waits for all of its own."""
    return getattr(_here, "copies", False)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    _here.copies = True
    while (job := jobs.get()) is not None:
        job()
        del job  # else it would keep its session's memory until the next one


def _stop_worker(jobs: SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_PATIENCE_S)
