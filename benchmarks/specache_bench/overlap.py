"""The parts of a decode step: operators that are called one by one, and the time of those on caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from specache_fx.runtime.tracing import Span, recording

_TRACED_STEPS = 8
_PROFILED_STEPS = 4


def operator_calls(step: Callable[[], object]) -> float:
    """PyTorch operators that a step calls, those that others call too: what is paid for one by one.

    Kernels that Inductor made are called by its own code, and are not among them.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(_PROFILED_STEPS):
            step()
    counts = [
        event.count for event in profile.key_averages() if event.key.startswith(("aten::", "specache::"))
    ]
    return sum(counts) / _PROFILED_STEPS


def record_steps(step: Callable[[], object]) -> list[Span]:
    """What a few steps do, and when; see `specache_fx.trace`."""
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
    if not steps:
        return None
    names = ("decode step", "attention", "append", "select", "start prefetch", "wait for prefetch")
    return {name: 1e3 * median(_seconds_in(step, name, spans) for step in steps) for name in names}


def _seconds_in(step: Span, name: str, spans: Sequence[Span]) -> float:
    inside = (span for span in spans if span.name == name and step.start <= span.start < step.stop)
    return sum(span.stop - span.start for span in inside)
