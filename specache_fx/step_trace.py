"""What Dynamo is to know of a decode step while it traces one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from specache_fx.progress import traced

_here = threading.local()


@contextlib.contextmanager
def decoding(mark: Callable[[], object]) -> Iterator[None]:
    """Within it, this thread decodes.

    Args:
        mark: Marks sizes of the call's tensors as dynamic; called if Dynamo traces them.
    """
    before = getattr(_here, "mark", None)
    _here.mark = mark
    try:
        yield
    finally:
        _here.mark = before


def num_traces() -> int:
    """How many decode steps Dynamo has traced in this thread."""
    return getattr(_here, "traces", 0)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While Dynamo traces a frame for this backend: a decode step's says so, if it takes long."""
    mark: Callable[[], object] | None = getattr(_here, "mark", None)
    if mark is None:
        yield
        return
    _here.traces = num_traces() + 1
    mark()
    with traced("the decode step"):
        yield
