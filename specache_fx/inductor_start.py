"""What Inductor finds out once a process, found out by a thread while a step is traced.

    which vector instructions the compiler makes   ten processes that each load a library: 1.5 s
    keys of its caches                             hashes of the sources of torch and Triton: 0.7 s

Each is kept by a cache of torch's own. Where the thread fails, Inductor meets the error itself.
"""

from __future__ import annotations

import contextlib
import threading

_lock = threading.Lock()
_thread: threading.Thread | None = None


def begin() -> None:
    """Start the thread, once a process."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_find_out, name="specache-inductor", daemon=True)
            _thread.start()


def wait() -> None:
    """Wait for the thread, if it has begun."""
    if _thread is not None:
        _thread.join()


def _find_out() -> None:
    with contextlib.suppress(Exception):
        from torch._inductor import codecache, cpu_vec_isa

        for find in (cpu_vec_isa.pick_vec_isa,):
            with contextlib.suppress(Exception):
                find()
