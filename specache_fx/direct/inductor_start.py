"""What Inductor finds out once a process, found out by a thread while a step is traced.

Which vector instructions the C++ compiler makes takes ten processes, each of which loads a library: 1.5 s. Torch keeps
the answer. Where the thread fails, Inductor meets the error itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading


@functools.cache
def begin() -> threading.Thread:
    """Start the thread, once a process."""
    thread = threading.Thread(target=_find_out, name="specache-inductor", daemon=True)
    thread.start()
    return thread


def wait() -> None:
    """Wait for the thread, if it has begun."""
    if begin.cache_info().currsize:
        begin().join()


def _find_out() -> None:
    with contextlib.suppress(Exception):
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()
