"""What Dynamo is to know of a decode step while it traces one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from specache_fx.progress import traced

_here = threading.local()


@contextlib.contextmanager
def decoding(mark: Callable[[], object]) -> Iterator[list[str]]:
    """Within it, this thread decodes.

    Args:
        mark: Marks sizes of the call's tensors as dynamic; called if Dynamo traces them.

    Yields:
        A list that gets an item for each trace.
    """
    before = getattr(_here, "mark", None)
    traces: list[str] = []

    def marked() -> None:
        traces.append("a trace")
        mark()

    _here.mark = marked
    try:
        yield traces
    finally:
        _here.mark = before


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While Dynamo traces a frame for this backend: a decode step's says so, if it takes long."""
    mark: Callable[[], object] | None = getattr(_here, "mark", None)
    if mark is None:
        yield
        return
    mark()
    with traced("the decode step"):
        yield
