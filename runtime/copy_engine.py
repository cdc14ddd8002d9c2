"""`CopyEngine`: brings chosen 16-bit rows from the host to a layer's staging slots, beside compute.

A layer has one set of slots, not two. In a step the order for layer i is: wait, attention (which reads the
slots), selection, prefetch (which overwrites them). The next read is behind the next step's wait, so a copy
never meets a reader. On the CPU a copy starts when attention has returned; on CUDA the copy stream first
waits for an event that is recorded behind attention.

Three ways lead there. Where the device reads the host's rows by itself (CUDA, page-locked memory, Triton), two kernels
on a side stream do everything (`device_copy`). Where both are memory of the CPU, C++ copies at once: some 40 us
a layer, and no thread that would take a core from the products. Else a thread gathers the rows (`copy_job`).

Paper: SpeCache §3.3, Alg. 3 (the top-k pairs of the next step are prefetched while this one computes).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

from specache_fx.errors import SpecacheError
from specache_fx.runtime import device_copy
from specache_fx.runtime.copy_job import CopyJob, CopyMetrics
from specache_fx.runtime.host_cache import HostCache
from specache_fx.runtime.native import copies
from specache_fx.runtime.staging import Outcome, Staging
from specache_fx.runtime.tracing import span

__all__ = ["CopyEngine", "CopyMetrics"]

_EXIT_PATIENCE_S = 5.0


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
        self._arguments: dict[int, copies.StageArguments] = {}
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stop: weakref.finalize[..., CopyEngine] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        on_device = device_copy.runs(host, device) if on_device is None else on_device
        self._on_device = device_copy.DeviceCopy(host, device) if on_device else None
        if self._on_device is not None and self._stream is not None:
            # Dropped without `close`: what the kernels read and write must not be given to others meanwhile.
            # A captured step makes its copies on the stream that replays it, so all streams count.
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False
        at_once = device.type == "cpu" and host.in_memory and self._on_device is None and delay is None
        self._library = copies.load() if at_once else None
        self._closed = False
        _engines.add(self)

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

        Raises:
            Exception: What the copy failed with, where it is made at once (the slots are as they were); or what the
                last one failed with, where a thread made it.
        """
        if self._closed:
            raise SpecacheError("This copy engine is closed: its session has ended.")
        staging = self.staging(layer)
        staging.join()
        if self._on_device is not None and staging.done is not None:
            torch.cuda.current_stream(self._device).wait_event(
                staging.done
            )  # it may still read what was wanted
        # A copy of our own: a compiled graph reuses the caller's buffer without asking.
        staging.wanted.copy_(indices)
        self._start(layer, staging)

    def prefetch_wanted(self, layer: int) -> None:
        """As `prefetch`, of the indices that C++ has left in the layer's slots."""
        self._start(layer, self.staging(layer))

    @property
    def copies_on_device(self) -> bool:
        """Whether the device plans and copies by itself."""
        return self._on_device is not None

    def update_table(self, layer: int) -> bool:
        """Tell the device where the host's rows are; whether that lies elsewhere now. See `DeviceCopy.table`."""
        assert self._on_device is not None
        before = self._on_device.table_of(layer)
        return self._on_device.table(layer) is not before

    def copy(self, layer: int, told: torch.Tensor) -> None:
        """Let the device bring what the slots want, on the current stream; see `DeviceCopy.copy`."""
        assert self._on_device is not None
        self._on_device.copy(layer, self.staging(layer), told)

    @contextlib.contextmanager
    def beside(self, layer: int) -> Iterator[None]:
        """Launch the block behind what the current stream has been given so far, and beside what it is given next."""
        if self._delay is not None:
            self._delay()
        if self._stream is None:
            yield
            return
        staging = self.staging(layer)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            if not torch.cuda.is_current_stream_capturing():  # else the event is known in the graph alone
                staging.done = staging.done or torch.cuda.Event()
                staging.done.record(self._stream)
        if self._synchronous:
            self.join()

    def join(self) -> None:
        """Order what comes next on the current stream behind all that was launched beside it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @property
    def copies_at_once(self) -> bool:
        """Whether a copy is one call of C++, with no thread."""
        return self._library is not None

    def arguments(self, layer: int, c: copies.StageC | None = None) -> copies.StageArguments:
        """What brings `wanted` to the layer's slots as one call of C++; valid until the host's rows change.

        Args:
            layer: Layer number.
            c: Where it is to be from now on.
        """
        if c is not None or layer not in self._arguments:
            staging = self.staging(layer)
            self._arguments[layer] = copies.StageArguments(staging.wanted, staging.slots, staging.rows, c)
        self._arguments[layer].of_host(*self._host.blocks(layer), self._host.length(layer))
        return self._arguments[layer]

    def count_copies(
        self, fetched_rows: int, fetched_bytes: int, kept_rows: int, kept_bytes: int, seconds: float
    ) -> None:
        """Count copies that C++ has made by itself."""
        metrics = self._metrics
        metrics.fetched_rows += fetched_rows
        metrics.fetched_bytes += fetched_bytes
        metrics.reused_rows += kept_rows
        metrics.reused_bytes += kept_bytes
        # Nothing is computed meanwhile.
        metrics.copy_seconds += seconds
        metrics.waited_seconds += seconds

    def is_copying(self, layer: int) -> bool:
        """Whether `wait` would wait."""
        job = self.staging(layer).job
        return job is not None and not job.done()

    def _start(self, layer: int, staging: Staging) -> None:
        if self._on_device is not None:
            with self.beside(layer):
                self._on_device.copy(layer, staging)
            return
        if self._library is not None:
            arguments = self.arguments(layer)
            with span("prefetch", "copies", layer=layer):
                arguments.check(arguments.call(self._library), layer)
            c = arguments.c
            self.count_copies(c.fetched, c.fetched * c.row_bytes, c.kept, c.kept * c.row_bytes, c.seconds)
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

    def wait(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Order what comes next on the current stream (or thread) behind the layer's last prefetch.

        Returns:
            rows `[batch, num_kv_heads, top_k, key_dim + value_dim]` and indices int32 `[batch, num_kv_heads,
            top_k]`, on the device, valid until the layer's next prefetch. An empty slot has index -1, and a
            row that means nothing. All are empty before the first prefetch.

        Raises:
            Exception: Whatever the copy failed with, once; the slots are empty then.
        """
        staging = self.staging(layer)
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
        if self._on_device is not None and self._stream is not None:
            torch.cuda.synchronize(self._device)  # replayed steps record no events

    def close(self) -> None:
        """Wait for the copies under way, then let go of thread and slots; twice is fine. Errors end here."""
        self._closed = True
        for staging in self._staging.values():
            with contextlib.suppress(Exception):
                staging.join()
        if self._stop is not None:
            self._stop()
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        self._staging.clear()
        self._arguments.clear()

    def pause(self) -> None:
        """Return when no copy is under way; what one failed with is left to `wait`."""
        for staging in list(self._staging.values()):
            if staging.job is not None:
                staging.job.wait()

    def forget_thread(self) -> None:
        """In a forked process, which lacks it: have the next copy start one."""
        self._jobs = SimpleQueue()
        if self._stop is not None:
            self._stop.detach()
        self._stop = None

    def staging(self, layer: int) -> Staging:
        """The layer's slots."""
        if layer not in self._staging:
            num_kv_heads, key_dim, value_dim = self._host.shapes[layer]
            shape = (self._host.batch, num_kv_heads, self._top_k)
            row_dim = key_dim + value_dim
            self._staging[layer] = Staging.empty(shape, row_dim, self._host.dtype, self._device)
        return self._staging[layer]


_engines: weakref.WeakSet[CopyEngine] = weakref.WeakSet()


def _before_fork() -> None:
    for engine in list(_engines):
        engine.pause()


def _in_child() -> None:
    for engine in list(_engines):
        engine.forget_thread()


if hasattr(os, "register_at_fork"):
    # A forked process has no thread that copies: it gets no copy that is half made.
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)

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
        thread.join(_EXIT_PATIENCE_S)
