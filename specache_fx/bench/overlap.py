"""What a step is made of: operators that are called one by one, and copies that lie beside compute or don't."""

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


def hidden_share(spans: Sequence[Span]) -> float | None:
    """The share of copy time that overlapped compute; None where nothing was copied.

    A copy overlaps nothing while it is waited for, nor where whoever computes makes it.

    Args:
        spans: Of steps, in the order of their starts: "prefetch" on the copies' track, "start prefetch", "attention"
            and "wait for prefetch" on that of compute.
    """
    copies = [(span.start, span.stop) for span in spans if span.name == "prefetch"]
    starts = [(span.start, span.stop) for span in spans if span.name == "start prefetch"]
    waits = [_wait_for(span, spans) for span in spans if span.name == "wait for prefetch"]
    total = sum(stop - start for start, stop in copies)
    if not total:
        return None
    waited = 0.0
    for start, stop in copies:
        if any(begun <= start and stop <= ended for begun, ended in starts):
            waited += stop - start
        else:  # no two waits of a session run at the same time
            waited += sum(max(0.0, min(stop, ended) - max(start, begun)) for begun, ended in waits)
    return 1 - waited / total


def _wait_for(wait: Span, spans: Sequence[Span]) -> tuple[float, float]:
    """When a wait began and ended: from the start of the prefetch on, where nothing was computed in between."""
    before = [span for span in spans if span.start < wait.start]
    for span in reversed(before):
        if span.name == "attention":
            break
        if span.name == "start prefetch" and span.args == wait.args:
            return span.start, wait.stop
    return wait.start, wait.stop
