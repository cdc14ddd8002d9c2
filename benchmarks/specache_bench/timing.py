"""Timing: several functions in turn, so that what else the machine does meets all of them alike; parts of a step."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from specache_fx.runtime.tracing import Span, recording

_COPY_BYTES = 256 << 20
_COPIES = 9
_TRACED_STEPS = 8
_START_S = 0.5  # until an interpreter has started
_PARTS = ("decode step", "attention", "append", "select", "start prefetch", "wait for prefetch")

Turn = Callable[[int], list[float]]
"""Makes so many calls, and says how many seconds each took."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call: the median, the tenth that was faster, the tenth that was slower; and how many calls."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Of the times of all calls, at least one."""
        p10, middle, p90 = (1e3 * np.percentile(seconds, (10, 50, 90))).tolist()
        return cls(middle, p10, p90, len(seconds))


def seconds_of(function: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Seconds of each of some calls in a row, the device waited for."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def take_turns(
    turns: Mapping[str, Turn], rounds: int, calls: int, on_round: Callable[[], object] = lambda: None
) -> dict[str, Timing]:
    """In each round, so many calls of each in a row. They have been called before: nothing is warmed up here."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            seconds[name] += turn(calls)
        on_round()
    return {name: Timing.of(times) for name, times in seconds.items()}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Meanwhile so many other processes compute all the time."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(_START_S)
        yield


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a plain copy moves, read and written ones counted: what the floors are computed from."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = Timing.of(seconds_of(lambda: target.copy_(source), device, _COPIES))
    return 2 * _COPY_BYTES / (timing.p10_ms / 1e3)


def record_steps(step: Callable[[], object]) -> list[Span]:
    """The events of a few steps, with their times; see `specache_fx.trace`."""
    with recording() as recorder:
        for _ in range(_TRACED_STEPS):
            step()
        return recorder.finish()


def parts_of(spans: Sequence[Span]) -> dict[str, float] | None:
    """Milliseconds of a step: of its graph ("decode step"), and of the operators on caches that the graph calls.

    The rest of the graph is products with weights and the model's other operations; the rest of the step is Python.

    Args:
        spans: Of steps, of which the median counts; None is returned where there is none.
    """
    steps = [span for span in spans if span.name == "decode step"]

    def seconds_in(step: Span, name: str) -> float:
        inside = (span for span in spans if span.name == name and step.start <= span.start < step.stop)
        return sum(span.stop - span.start for span in inside)

    return (
        {name: 1e3 * median(seconds_in(step, name) for step in steps) for name in _PARTS} if steps else None
    )
