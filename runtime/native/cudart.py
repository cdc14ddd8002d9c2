"""CUDA's runtime library, as torch has loaded it: the calls that torch has no function for.

A call that fails leaves its error behind, and the next check of anybody raises it. These clear it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from typing import Any

import torch

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
    """Its functions: those that torch calls itself, whatever other library is in the process. HIP's are the same.

    Raises:
        OSError: If torch does not say where they are (a build that links them in).
    """
    torchs = ctypes.CDLL(torch._C.__file__)
    prefix = "cuda" if torch.version.hip is None else "hip"
    found = types.SimpleNamespace()
    for name, kinds in _SIGNATURES.items():
        try:
            function = torchs[prefix + name.removeprefix("cuda")]
        except AttributeError as error:
            raise OSError(f"this torch has no {name}") from error
        function.argtypes, function.restype = kinds, ctypes.c_int
        setattr(found, name, function)
    return found


def _call(name: str, *args: Any) -> None:
    if code := getattr(library(), name)(*args):
        library().cudaGetLastError()
        raise OSError(f"{name} failed with error {code}")


def on(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Call for that device. A thread that names none calls for device 0, and makes a context there."""
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def register(address: int, nbytes: int, device: torch.device | None) -> None:
    """Lock the pages of host memory, so that kernels read it at the same address.

    Args:
        address: Where it is.
        nbytes: Its size.
        device: Where the kernels run; None, or no GPU: the thread's current one.

    Raises:
        OSError: If CUDA refuses, or kernels would find it at another address; nothing has changed then.
    """
    seen = ctypes.c_void_p()
    with on(device):
        _call("cudaHostRegister", address, nbytes, _PORTABLE_AND_MAPPED)
        try:
            _call("cudaHostGetDevicePointer", ctypes.byref(seen), address, 0)
            if seen.value != address:
                raise OSError("the device has another address for what cudaHostRegister locked")
        except OSError:
            unregister(address, device)
            raise


def unregister(address: int, device: torch.device | None) -> None:
    """Unlock what `register` locked. What CUDA says is passed over: the memory goes either way."""
    with on(device):
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
