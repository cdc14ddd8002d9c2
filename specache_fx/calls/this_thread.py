"""What the current thread does: values that hold within a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from specache_fx.report.progress import traced


class _Here(threading.local):
    """Values of a thread.

    Attributes:
        filling: Caches that calls are filling.
        frame: What Dynamo converts for this backend, with `f_code` and `f_globals`; None outside of that.
        mark: Marks sizes of a decode step's tensors as dynamic, where Dynamo traces it; None where none decodes.
        num_traces: Decode steps that Dynamo has traced.
        waits: A first step waits for its graph.
    """

    filling: tuple[Any, ...] = ()
    frame: Any = None
    mark: Callable[[], object] | None = None
    num_traces = 0
    waits = False


here = _Here()


@contextlib.contextmanager
def having(**values: Any) -> Iterator[None]:
    """Within it, this thread has other values."""
    before = {name: getattr(here, name) for name in values}
    vars(here).update(values)
    try:
        yield
    finally:
        vars(here).update(before)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While Dynamo traces a frame for this backend: a decode step's says so, if it takes long."""
    if here.mark is None:
        yield
        return
    here.num_traces += 1
    here.mark()
    with traced("the decode step"):
        yield
