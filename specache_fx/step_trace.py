"""What Dynamo is to know of a decode step while it traces one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.fx.experimental import _config as sizes

from specache_fx.progress import traced

_ANY_SIZE = "backed_size_oblivious"  # torch's switch: a size of 1 may be a symbol
_here = threading.local()


@contextlib.contextmanager
def decoding(mark: Callable[[], object] | None = None) -> Iterator[None]:
    """Within it, this thread decodes.

    Args:
        mark: Marks sizes of the call's tensors as dynamic, if Dynamo traces them. A batch of one row is no constant of
            the graph then. None: it is.
    """
    before = getattr(_here, "step", None)
    _here.step = (mark,)
    try:
        yield
    finally:
        _here.step = before


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While Dynamo traces a frame for this backend: a decode step's says so, if it takes long."""
    step: tuple[Callable[[], object] | None] | None = getattr(_here, "step", None)
    if step is None:
        yield
        return
    (mark,), config = step, cast(Any, sizes)
    if mark is not None:
        mark()
    switch = config.patch({_ANY_SIZE: True}) if mark is not None and hasattr(config, _ANY_SIZE) else None
    with switch or contextlib.nullcontext(), traced("the decode step"):
        yield
