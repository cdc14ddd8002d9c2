"""Timing: several functions in turn, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

_COPY_BYTES = 256 << 20
_COPIES = 9

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
    def of(cls, seconds: list[float]) -> Timing:
        """Of the times of all calls, at least one."""
        ms = [1e3 * s for s in seconds]
        tenths = quantiles(ms, n=10, method="inclusive") if len(ms) > 1 else ms * 9
        return cls(median(ms), tenths[0], tenths[-1], len(ms))


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


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a plain copy moves, read and written ones counted: what the floors are computed from."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = Timing.of(seconds_of(lambda: target.copy_(source), device, _COPIES))
    return 2 * _COPY_BYTES / (timing.p10_ms / 1e3)
