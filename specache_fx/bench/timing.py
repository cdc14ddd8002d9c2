"""Timing: several functions in turn, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch

_COPY_BYTES = 256 << 20
_COPIES = 9


@dataclass(frozen=True)
class Timing:
    """How long one call took.

    Attributes:
        median_ms: Of all calls, in milliseconds.
        p10_ms: A tenth of them were faster.
        p90_ms: A tenth were slower.
        calls: How many were timed.
    """

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


def time_in_turn(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Call each function once in each round, and time every call.

    Args:
        functions: By name. They have been called before: nothing is warmed up here.
        rounds: How often all of them have their turn.
        device: Waited for after every call.
        on_round: Called after each round.
    """
    turns = {name: partial(seconds_of, function, device) for name, function in functions.items()}
    return take_turns(turns, rounds, 1, on_round)


Turn = Callable[[int], list[float]]
"""Makes so many calls, and says how many seconds each took."""


def seconds_of(function: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Seconds of each of some calls in a row."""
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
    """As `time_in_turn`, of what takes its own time: `calls` of one in a row."""
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
    timing = time_in_turn({"copy": lambda: target.copy_(source)}, _COPIES, device)["copy"]
    return 2 * _COPY_BYTES / (timing.p10_ms / 1e3)
