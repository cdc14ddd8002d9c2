"""A thread whose copies are late, whatever the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.transfer import CudaWorkerTransfer, Staging, WorkerTransfer


def late_transfer(
    host: HostCache, top_k: int, device: torch.device, delay: Callable[[], object] = lambda: None
) -> WorkerTransfer:
    """A transfer that calls `delay` before each copy, on the thread that copies."""

    class Late(CudaWorkerTransfer if device.type == "cuda" else WorkerTransfer):
        def _copy(self, layer: int, staging: Staging) -> Callable[[], tuple[int, int]]:
            copy = super()._copy(layer, staging)
            return lambda: (delay(), copy())[1]

    return Late(host, top_k, device)
