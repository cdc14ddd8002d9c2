"""CUDA's library for `runtime/native/cudart.py`, without a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_REGISTERED_ALREADY = 712


class FakeRuntime:
    """CUDA's library: registers memory in a dict; fails where it is told to, and keeps its last error."""

    def __init__(self) -> None:
        self.error = self.last_error = self.moved = 0
        self.registered: dict[int, int] = {}
        self.flags: set[int] = set()
        self.threads: list[str] = []  # that registered
        self.devices: set[Any] = set()  # for which it was called
        self.here = threading.local()

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.here.device = device
        yield
        self.here.device = None

    def called(self) -> None:
        """Note for which device."""
        self.devices.add(getattr(self.here, "device", None))

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.called()
        error = self.error or _REGISTERED_ALREADY * (address in self.registered)
        if error:
            self.last_error = error
            return error
        self.registered[address] = nbytes
        self.flags.add(flags)
        self.threads.append(threading.current_thread().name)
        return 0

    def cudaHostGetDevicePointer(self, pointer: Any, address: int, flags: int) -> int:
        pointer._obj.value = address + self.moved
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.called()
        del self.registered[address]
        return 0
