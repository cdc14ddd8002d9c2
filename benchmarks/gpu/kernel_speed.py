"""Each Triton kernel's time and bandwidth at 64k tokens of one sequence of Llama's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from benchmarks.gpu.checks import decode_inputs
from benchmarks.gpu.decoder import sync
from benchmarks.gpu.run import Run
from specache_fx.runtime import triton_ops
from specache_fx.runtime.host_cache import HostCache, resolve_host
from specache_fx.runtime.kernels import DecodeInputs
from specache_fx.runtime.kernels.triton_kernel import TritonKernel
from specache_fx.runtime.quant import on_gpu
from specache_fx.runtime.transfer import KernelTransfer


def kernels(run: Run, found: dict[str, Any]) -> None:
    """Microseconds and GB/s of what a kernel has to read and write, by bits."""
    if (reason := triton_ops.unavailable_reason(run.device)) is not None:
        found["skipped"] = reason
        return
    tokens = 128 if run.quick else 65536
    generator = torch.Generator().manual_seed(0)
    for bits in (2, 1):
        inputs = decode_inputs(run, bits, tokens, generator, batch=1)
        entry: dict[str, Any] = {}
        found[f"attention, {bits} bits"] = entry
        run.attempt(entry, lambda inputs=inputs, entry=entry: _attention(run, inputs, entry))  # type: ignore[misc]
        del inputs
    for name, work in (("select", _select), ("pack", _pack), ("gather", _gather)):
        entry = {}
        found[name] = entry
        run.attempt(entry, lambda work=work, entry=entry: work(run, tokens, entry))  # type: ignore[misc]


def _attention(run: Run, inputs: DecodeInputs, entry: dict[str, Any]) -> None:
    key, value = (sum(x.nbytes for x in planes) for planes in (inputs.key_planes, inputs.value_planes))
    assert inputs.staged_rows is not None
    rows = inputs.staged_rows.nbytes + inputs.window_key.nbytes + inputs.window_value.nbytes
    _, scores = TritonKernel().attention(inputs)
    _times(
        run,
        lambda: TritonKernel().attention(inputs),
        {"partial_attention": key + value + rows, "selection_scores": key + rows // 2 + scores.nbytes},
        entry,
    )


def _select(run: Run, tokens: int, entry: dict[str, Any]) -> None:
    from specache_fx.runtime.select import triton_topk

    top_k, block = (8, 32) if run.quick else (64, triton_topk.BLOCK)
    scores = torch.rand(1, 2 if run.quick else 8, tokens, device=run.device)
    staged = triton_topk.select_topk(scores, top_k, block)
    counts = torch.zeros(1, 4, dtype=torch.float64, device=run.device)
    _times(
        run,
        lambda: triton_topk.count_overlap(scores, top_k, staged, counts, block),
        {"_best_of_blocks": scores.nbytes, "_count_overlap": 3 * staged.nbytes},
        entry,
    )


def _pack(run: Run, tokens: int, entry: dict[str, Any]) -> None:
    group, dim = (16, 16) if run.quick else (64, 128)
    x = torch.randn(1, 2 if run.quick else 8, tokens // 4, dim, device=run.device).to(run.dtype)
    planes = sum(plane.nbytes for plane in on_gpu.pack_keys(x, 2, group))

    def both() -> None:
        on_gpu.pack_keys(x, 2, group)
        on_gpu.pack_values(x, 2, group)

    _times(run, both, {"pack_keys": x.nbytes + planes, "pack_values": x.nbytes + planes}, entry)


def _gather(run: Run, tokens: int, entry: dict[str, Any]) -> None:
    heads, dim, top_k = (2, 16, 8) if run.quick else (8, 128, 64)
    host = HostCache(1, [(heads, dim, dim)], run.dtype, resolve_host("auto", run.device))
    try:
        row = torch.zeros(1, heads, tokens, dim, dtype=run.dtype)
        host.append(0, row, row)
        copies, first = KernelTransfer(host, top_k, run.device), [0, tokens // 2]
        staging = copies.staging(0)
        at = torch.arange(top_k, dtype=torch.int32, device=run.device)

        def once() -> None:
            staging.wanted.copy_((at + first[0]).expand_as(staging.wanted))
            first.reverse()  # nothing of it is staged
            copies.copy(0)

        _times(run, once, {"copy_rows": staging.rows.nbytes, "plan_slots": 4 * staging.wanted.nbytes}, entry)
    finally:
        host.close()


def _times(run: Run, call: Callable[[], object], nbytes: dict[str, int], entry: dict[str, Any]) -> None:
    """The device's time of each kernel that a call launches; the call's own where there is no such device."""
    rounds, warm_up = (1, 0) if run.quick else (20, 3)
    for _ in range(warm_up):
        call()
    sync(run.device)
    cuda = run.device.type == "cuda"
    with profiled(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as prof:
        for _ in range(rounds):
            call()
        sync(run.device)
    for event in prof.key_averages():
        if cuda and event.device_type == DeviceType.CUDA:
            us = event.self_device_time_total / rounds
            name = next((kernel for kernel in nbytes if event.key.startswith(kernel)), None)
            entry[event.key[:60]] = {"us": round(us, 2), "launches": event.count / rounds}
            if name is not None:
                entry[event.key[:60]] |= {"bytes": nbytes[name], "gb_s": round(nbytes[name] / us / 1e3, 1)}
    if not cuda:
        entry["bytes"] = nbytes
