"""Streams of our own, captures, and waits for a device: what threads of one process must not do at the same time.

torch's streams come round-robin from a pool of 32, and a copy of one session could land on the stream that another
captures. A wait for the device ends a capture of any thread. So streams are lent to one owner at a time, and one lock
keeps captures and waits apart.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from specache_fx.runtime.native import cudart

COMPUTES, COPIES = -1, 0
"""Priorities: the model's next product waits for what is computed, nothing yet for what is copied beside it."""

_one_at_a_time = threading.RLock()  # captures, and waits for a device
# Another thread of the parent may have held it.
os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]
_idle: dict[tuple[int, int], list[torch.cuda.Stream]] = defaultdict(list)  # by device and priority


def lend(owner: object, device: torch.device, priority: int = COPIES) -> torch.cuda.Stream:
    """A stream of `device` that nobody else has while `owner` lives.

    Args:
        owner: Who uses it.
        device: Of type "cuda".
        priority: `COMPUTES` or `COPIES`.
    """
    with torch.cuda.device(device):
        idle = _idle[torch.cuda.current_device(), priority]
        try:
            stream = idle.pop()
        except IndexError:
            stream = _made(device, priority)
    weakref.finalize(owner, idle.append, stream).atexit = False
    return stream


def _made(device: torch.device, priority: int) -> torch.cuda.Stream:
    """A new stream, which lasts as long as the process; one of torch's where CUDA makes none."""
    try:
        return torch.cuda.ExternalStream(cudart.create_stream(priority), device=device)
    except OSError:
        return torch.cuda.Stream(device, priority)


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device, once no thread captures."""
    with _one_at_a_time:
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Have torch's allocator give back what it keeps, once no thread captures: within a capture it refuses."""
    with _one_at_a_time:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether work on a stream is captured now, and not run."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def capture(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any, run: Callable[[], Sequence[Any]]
) -> Sequence[Any]:
    """Have a graph capture what `run` launches; the current stream is as before, whether it succeeds or not.

    `torch.cuda.graph` also waits for the device and empties the allocator's cache, for milliseconds each time. Where it
    has no stream, it captures on one of the device on which it was used first.

    Args:
        graph: A new one.
        stream: Of the device where `run` launches; nobody else uses it.
        pool: Of memory, which the captures of one session share.
        run: Launches a step.

    Returns:
        What `run` returned.

    Raises:
        Exception: What `run` or CUDA failed with. The graph is empty then, and the allocator as it was.
    """
    with _one_at_a_time, torch.cuda.device(stream.device), _uncollected():
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            # Other threads may allocate meanwhile: the host tier reserves ahead in one.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = run()
                graph.capture_end()
            except BaseException:
                _abandon(graph, stream)
                raise
    return results


def _abandon(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """End a capture that failed: for CUDA, for torch's allocators and generators, and give its pool back.

    CUDA ends a capture that is invalid with an error, and torch stops there: its allocators would believe for ever that
    a capture is under way. So torch gets an empty capture to end instead.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError, OSError):  # it failed behind that, and all is ended
                cudart.begin_capture(stream.cuda_stream)
                graph.capture_end()
    graph.reset()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage: a session that dies waits for the device, which no capture survives."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
