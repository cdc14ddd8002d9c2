"""Bandwidths of memory and bus; what the gather kernel gets out of it, beside a plain copy of as many bytes."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.decoder import sync
from benchmarks.gpu.run import Run
from specache_fx.runtime import triton_ops
from specache_fx.runtime.host_cache import HostCache, resolve_host
from specache_fx.runtime.transfer import CudaWorkerTransfer, KernelTransfer, WorkerTransfer


def memory(run: Run, found: dict[str, Any]) -> None:
    """Gigabytes a second that a copy within the device reads and writes, and over the bus either way."""
    size = 1 << (16 if run.quick else 30)
    here = torch.zeros(size, dtype=torch.uint8, device=run.device)
    there = torch.empty_like(here)
    found["device_gb_s"] = 2 * size / _time(run, lambda: there.copy_(here)) / 1e6
    host = torch.zeros(size // 4, dtype=torch.uint8, pin_memory=run.device.type == "cuda")
    part = here[: size // 4]
    for name, to, of in (("to_device_gb_s", part, host), ("from_device_gb_s", host, part)):
        found[name] = size / 4 / _time(run, lambda to=to, of=of: to.copy_(of, non_blocking=True)) / 1e6  # type: ignore[misc]


def gather(run: Run, found: dict[str, Any]) -> None:
    """Rows of 512 bytes (head_dim 128, bfloat16), all of them new in each round, by how many are wanted."""
    batch, heads, dim, tokens = (1, 2, 16, 256) if run.quick else (8, 8, 128, 16384)
    pinned = run.device.type == "cuda"
    host = HostCache(batch, [(heads, dim, dim)], run.dtype, resolve_host("auto", run.device))
    try:
        row = torch.zeros(batch, heads, tokens, dim, dtype=run.dtype)
        host.append(0, row, row)
        for top_k in (8,) if run.quick else (16, 64, 256):
            entry: dict[str, Any] = {}
            found[f"top_k {top_k}"] = entry
            nbytes = batch * heads * top_k * 2 * dim * run.dtype.itemsize
            entry["bytes"] = nbytes
            if triton_ops.unavailable_reason(run.device) is None:
                run.attempt(entry, lambda entry=entry, top_k=top_k: _kernel(run, host, top_k, entry))  # type: ignore[misc]
            run.attempt(entry, lambda entry=entry, top_k=top_k: _thread(run, host, top_k, entry))  # type: ignore[misc]
            whole = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
            target = torch.empty_like(whole, device=run.device)
            ms = _time(run, lambda whole=whole, target=target: target.copy_(whole, non_blocking=True))  # type: ignore[misc]
            entry |= {"plain_ms": ms, "plain_gb_s": nbytes / ms / 1e6}
    finally:
        host.close()


def _kernel(run: Run, host: HostCache, top_k: int, entry: dict[str, Any]) -> None:
    copies = KernelTransfer(host, top_k, run.device)
    staging = copies.staging(0)
    selections = _selections(run, host, top_k)

    def once() -> None:
        staging.wanted.copy_(selections[0])
        selections.reverse()  # the other one: nothing of it is staged
        copies.copy(0)

    ms = _time(run, once)
    entry |= {"gather_ms": ms, "gather_gb_s": entry["bytes"] / ms / 1e6}


def _thread(run: Run, host: HostCache, top_k: int, entry: dict[str, Any]) -> None:
    """The way without Triton."""
    kind = CudaWorkerTransfer if run.device.type == "cuda" else WorkerTransfer
    worker = kind(host, top_k, run.device)
    worker.synchronous = True
    selections = _selections(run, host, top_k)

    def once() -> None:
        worker.prefetch(0, selections[0])
        selections.reverse()
        worker.wait(0)

    ms = _time(run, once)
    worker.close()
    entry |= {"thread_ms": ms, "thread_gb_s": entry["bytes"] / ms / 1e6}


def _selections(run: Run, host: HostCache, top_k: int) -> list[torch.Tensor]:
    """Two that have no token in common, scattered over the context."""
    tokens = host.length(0)
    step = tokens // (2 * top_k)
    first = torch.arange(top_k, dtype=torch.int32, device=run.device) * (2 * step)
    shape = (host.batch, host.shapes[0][0], top_k)
    return [(first + offset).expand(shape).contiguous() for offset in (0, step)]


def _time(run: Run, once: Any) -> float:
    """Milliseconds of a call, the mean of many."""
    rounds = 2 if run.quick else 50
    for _ in range(3):
        once()
    sync(run.device)
    start = time.perf_counter()
    for _ in range(rounds):
        once()
    sync(run.device)
    return 1000 * (time.perf_counter() - start) / rounds
