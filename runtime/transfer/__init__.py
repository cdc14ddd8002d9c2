"""Transfers: they bring chosen 16-bit rows from the host to a layer's slots. One a session.

    CpuTransfer          memory to memory, at once: no thread takes a core from the products
    CudaTransfer         kernels on a side stream read page-locked memory by themselves; no index visits the CPU
    KernelTransfer       the same kernels on the stream that computes, and in Triton's interpreter
    WorkerTransfer       a thread: rows in files, which may have to come from a disk
    CudaWorkerTransfer   a thread and a side stream: rows that a GPU can't read by itself

A layer has one set of slots, not two. In a step the order for layer i is: wait, attention (which reads the slots),
selection, prefetch (which overwrites them). The next read is behind the next step's wait, so a copy never meets a
reader.

Paper: SpeCache §3.3, Alg. 3 (the top-k pairs of the next step are prefetched while this one computes).
"""

from __future__ import annotations

import torch

from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.native import triton_ops
from specache_fx.runtime.transfer.base import Transfer
from specache_fx.runtime.transfer.cpu import CpuTransfer
from specache_fx.runtime.transfer.cuda import CudaTransfer, KernelTransfer
from specache_fx.runtime.transfer.cuda_worker import CudaWorkerTransfer
from specache_fx.runtime.transfer.staging import Staging, plan_slots
from specache_fx.runtime.transfer.worker import WorkerTransfer, copies_here

__all__ = [
    "CpuTransfer",
    "CudaTransfer",
    "CudaWorkerTransfer",
    "KernelTransfer",
    "Staging",
    "Transfer",
    "WorkerTransfer",
    "choose_transfer",
    "copies_here",
    "plan_slots",
]


def choose_transfer(
    host: HostCache, top_k: int, device: torch.device, *, interpreted: bool = False
) -> Transfer:
    """The transfer of a session.

    Args:
        host: Where the rows come from.
        top_k: Slots of each layer, batch row and kv head.
        device: Where the rows go.
        interpreted: Triton's interpreter runs the session's kernels, on the CPU: it reads memory as a GPU does.
    """
    if device.type == "cuda":
        by_itself = host.is_pinned and triton_ops.runs_by_itself(device)
        return (CudaTransfer if by_itself else CudaWorkerTransfer)(host, top_k, device)
    if not host.in_memory:
        return WorkerTransfer(host, top_k, device)
    return (KernelTransfer if interpreted else CpuTransfer)(host, top_k, device)
