"""What Inductor finds out once a process, found out by a thread while a step is traced. Torch keeps the answers.

Keys of its cache are digests of the files of torch and Triton: half a second. Which vector instructions the compiler
makes takes up to seven small libraries, kept in the same cache. Torch loads each in a process of its own, which takes
1.5 s. This process does here, as it loads the kernels beside them. Where the thread fails, Inductor meets the error.

The thread reads thousands of files, and asks for the interpreter behind each. Python hands it over every 5 ms: the
thread worked for 0.7 s, and waited for 0.8 s. While it runs, threads switch every 0.1 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


@functools.cache
def begin() -> threading.Thread:
    """Start the thread, once a process."""
    thread = threading.Thread(target=_find_out, name="specache-inductor", daemon=True)
    thread.start()
    return thread


def wait() -> None:
    """Wait for the thread, if it has begun; where it hangs, Inductor finds out by itself."""
    if begin.cache_info().currsize:
        begin().join(timeout=60)


def _find_out() -> None:
    with contextlib.suppress(Exception), _switching(seconds=1e-4):
        from torch._inductor import codecache, compile_fx, cpu_vec_isa  # noqa: F401  (the import takes a second)

        codecache.CacheBase.get_system()
        codecache.torch_key()
        with _loading_here(cpu_vec_isa.VecISA):
            cpu_vec_isa.pick_vec_isa()


@contextlib.contextmanager
def _switching(seconds: float) -> Iterator[None]:
    """Have threads give the interpreter away after so many seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(seconds, before))
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:  # nobody else has set it
            sys.setswitchinterval(before)


def _loading_here(isa: Any) -> contextlib.AbstractContextManager[Any]:
    """Load the libraries in this process, where this torch has a function of that."""
    if not hasattr(isa, "_probe_load"):
        return contextlib.nullcontext()
    return mock.patch.object(isa, "_probe_load", _loads)


def _loads(_: Any, path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True
