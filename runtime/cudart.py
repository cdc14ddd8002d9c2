"""CUDA's runtime library, as torch has loaded it: the calls that torch has no function for.

A call that fails leaves its error behind, and the next check of anybody raises it. These clear it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_PORTABLE_AND_MAPPED = 1 | 2  # of cudaHostRegister: for every context, and readable by kernels
_NON_BLOCKING = 1  # of a stream: it does not wait for the legacy default stream
_THREAD_LOCAL = 1  # of a capture: other threads may do as they like

_SIGNATURES: dict[str, list[Any]] = {
    "cudaGetLastError": [],
    "cudaHostRegister": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cudaHostUnregister": [ctypes.c_void_p],
    "cudaHostGetDevicePointer": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint],
    "cudaStreamCreateWithPriority": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int],
    "cudaStreamBeginCapture": [ctypes.c_void_p, ctypes.c_int],
}


@functools.cache
def library() -> Any:
    """The library with its functions declared; torch's CUDA builds have it in the process."""
    process = ctypes.CDLL(None)
    for name, types in _SIGNATURES.items():
        function = getattr(process, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return process


def _call(name: str, *args: Any) -> None:
    if code := getattr(library(), name)(*args):
        library().cudaGetLastError()
        raise OSError(f"{name} failed with error {code}")


def register(address: int, nbytes: int) -> None:
    """Lock the pages of host memory, so that the current device's kernels read it at the same address.

    Raises:
        OSError: If CUDA refuses, or has another address for it; nothing has changed then.
    """
    _call("cudaHostRegister", address, nbytes, _PORTABLE_AND_MAPPED)
    seen = ctypes.c_void_p()
    try:
        _call("cudaHostGetDevicePointer", ctypes.byref(seen), address, 0)
        if seen.value != address:
            raise OSError("the device has another address for memory that cudaHostRegister locked")
    except OSError:
        unregister(address)
        raise


def unregister(address: int) -> None:
    """Unlock what `register` locked. What CUDA says is passed over: the memory goes either way."""
    if library().cudaHostUnregister(address):
        library().cudaGetLastError()


def create_stream(priority: int) -> int:
    """Make a stream of the current device; lower numbers come first, 0 is last.

    Raises:
        OSError: If there can be no more.
    """
    made = ctypes.c_void_p()
    _call("cudaStreamCreateWithPriority", ctypes.byref(made), _NON_BLOCKING, priority)
    return int(made.value or 0)


def begin_capture(stream: int) -> None:
    """Begin a capture on a stream, beside torch's back.

    Raises:
        OSError: If it can't begin.
    """
    _call("cudaStreamBeginCapture", stream, _THREAD_LOCAL)
