"""`Recorder`: when compute, copies and waits took place, so that their overlap can be looked at.

Nothing is recorded, and next to nothing spent, unless `specache_fx.trace` made a recorder.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        name: Name of the event.
        track: "copies", "compute", or on CUDA the stream that it ran on.
        thread: Number of the thread that ran or issued it.
        start: Seconds of `time.perf_counter`.
        stop: Likewise.
        args: Further fields, such as the layer.
    """

    name: str
    track: str
    thread: int
    start: float
    stop: float
    args: dict[str, int | str]


@dataclass
class Recorder:
    """Collects spans, from any thread.

    Attributes:
        spans: Those that are over.
    """

    spans: list[Span] = field(default_factory=list)
    _on_device: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event, dict[str, int | str]]] = field(
        default_factory=list
    )
    _base: tuple[float, torch.cuda.Event] | None = None

    @contextlib.contextmanager
    def span(
        self, name: str, track: str, stream: torch.cuda.Stream | None, args: dict[str, int | str]
    ) -> Iterator[None]:
        """Record the block; on a CUDA stream by events of it, else by the clock."""
        start = time.perf_counter()
        begun = None if stream is None else self._mark(stream)
        try:
            yield
        finally:
            if stream is None or begun is None:
                thread = threading.get_native_id()
                self.spans.append(Span(name, track, thread, start, time.perf_counter(), args))
            else:
                ended = torch.cuda.Event(enable_timing=True)
                ended.record(stream)
                self._on_device.append((name, f"{track} (stream)", begun, ended, args))

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        if self._base is None:
            base = torch.cuda.Event(enable_timing=True)
            base.record(stream)
            base.synchronize()
            self._base = time.perf_counter(), base
        begun = torch.cuda.Event(enable_timing=True)
        begun.record(stream)
        return begun

    def finish(self) -> list[Span]:
        """All spans in the order of their starts; waits for the device."""
        if self._base is not None:
            at, base = self._base
            for name, track, begun, ended, args in self._on_device:
                ended.synchronize()  # not the device: another thread may be capturing
                start, stop = (at + base.elapsed_time(event) / 1e3 for event in (begun, ended))
                self.spans.append(Span(name, track, 0, start, stop, args))
            self._on_device.clear()
        return sorted(self.spans, key=lambda span: span.start)


_recorders: list[Recorder] = []
_NOTHING = contextlib.nullcontext()


def span(
    name: str,
    track: str = "compute",
    *,
    device: torch.device | None = None,
    stream: torch.cuda.Stream | None = None,
    **args: int | str,
) -> contextlib.AbstractContextManager[None]:
    """Record the time of the block, if a trace is on.

    Args:
        name: Name of the event.
        track: Where to show it.
        device: Where its work is done: on CUDA it is timed on the current stream.
        stream: Instead of the current one.
        **args: Shown with it.
    """
    if not _recorders:
        return _NOTHING
    if stream is None and device is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device)
    return _recorders[-1].span(name, track, stream, args)


def add_span(name: str, track: str, start: float, stop: float, **args: int | str) -> None:
    """Record an event that was timed elsewhere, in seconds of `time.perf_counter`, if a trace is on."""
    if _recorders:
        _recorders[-1].spans.append(Span(name, track, threading.get_native_id(), start, stop, args))


def is_recording() -> bool:
    """Whether somebody wants to know."""
    return bool(_recorders)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record in this block, in all threads. Of two that are nested the inner one records."""
    recorder = Recorder()
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)
