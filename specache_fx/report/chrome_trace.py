"""`specache_fx.trace`: a picture of prefetch and compute, side by side."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError
from specache_fx.runtime.tracing import Span, recording


@contextlib.contextmanager
def trace(path: str | Path) -> Iterator[None]:
    """Write a trace of the decode steps in this block, for https://ui.perfetto.dev or chrome://tracing.

        with specache_fx.trace("steps.json"):
            model.generate(...)

    Each step of each session is there with its attentions, selections, waits and appends. The gaps are the
    model's own. The copies of the prefetch are on tracks of their own: on the CPU one for each thread that made some,
    on CUDA the copy stream's (by its events).

    Args:
        path: A JSON file; written when the block ends, also where it ends with an error.

    Raises:
        ConfigError: If there is no such folder.
    """
    file = Path(path)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"trace({str(path)!r}): give a file in a folder that exists.")
    with recording() as recorder:
        try:
            yield
        finally:
            write_trace(file, recorder.finish())


def write_trace(file: Path, spans: Sequence[Span]) -> None:
    """Write recorded spans in the Trace Event Format: times in microseconds from the first one's start."""
    first = spans[0].start if spans else 0.0
    tracks: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        number = tracks.setdefault((span.track, span.thread), len(tracks) + 1)
        times = {"ts": 1e6 * (span.start - first), "dur": 1e6 * (span.stop - span.start)}
        place = {"ph": "X", "pid": 1, "tid": number}
        events.append({"name": span.name, "cat": span.track, **place, **times, "args": span.args})
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
        for (track, _), number in tracks.items()
    ]
    file.write_text(json.dumps({"traceEvents": [*names, *events]}) + "\n", encoding="utf-8")
