"""How much of the copies lies beside compute: read off a trace, not off the counters of those who copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specache_fx.runtime.tracing import Span, recording

TRACED_STEPS = 8


def record_steps(step: Callable[[], object], steps: int = TRACED_STEPS) -> list[Span]:
    """What a few steps do, and when; see `specache_fx.trace`."""
    with recording() as recorder:
        for _ in range(steps):
            step()
        return recorder.finish()


def hidden_share(spans: Sequence[Span]) -> float | None:
    """Of the time in which pairs were copied, what compute did not spend waiting; None where nothing was copied.

    Args:
        spans: Of steps: "prefetch" on the copies' track, "wait for prefetch" on that of compute.
    """
    copies = [(span.start, span.stop) for span in spans if span.name == "prefetch"]
    waits = [(span.start, span.stop) for span in spans if span.name == "wait for prefetch"]
    total = sum(stop - start for start, stop in copies)
    if not total:
        return None
    # Neither copies nor waits of a session run at the same time as others of their kind.
    waited = sum(
        max(0.0, min(stop, ended) - max(start, begun)) for start, stop in copies for begun, ended in waits
    )
    return 1 - waited / total
