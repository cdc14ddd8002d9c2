"""What only CUDA can say of captures, streams and page-locked memory: checks of seconds, for `specache_bench.gpu`.

Each gives what it saw, and `ok`. `tests/support/streams_sim.py` simulates the same without a GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import specache_fx
from specache_bench.speed import ModelSize
from specache_fx.runtime.host.host_blocks import PinnedStore
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.native import cuda_streams, cudart
from specache_fx.runtime.steps.step_graph import CudaRecorder, NotCapturedError

Found = dict[str, Any]
SMALL: Found = {"group_size": 16, "residual_length": 16, "top_k": 16, "lowering": "eager"}
FORMS: dict[str, Found] = {
    "token": {"lookahead": "token"},
    "kcache": {"policy": "kcache"},
    "none": {"lookahead": "none"},
    "query": {"lookahead": "query"},
    "kivi": {"policy": "kivi"},
    "sinks": {"lookahead": "token", "sink_tokens": 2},
    "corrected": {"lookahead": "token", "key_share": 2**-6, "value_share": 0.0},
}
_CAPTURES = 30


def _nothing(*_: Any) -> tuple[()]:
    return ()


def _captures_well(recorder: CudaRecorder, device: torch.device, lasts: float = 0) -> bool:
    """Whether a capture that lasts so many seconds replays what it should, on what its input is by then."""
    given = torch.ones(1000, device=device)

    def run() -> list[torch.Tensor]:
        time.sleep(lasts)
        return [given * 2 + 1]

    results, replay = recorder.record(run, _nothing)
    first = results[0].clone()
    given.fill_(3)
    replay()
    return bool((first == 3).all()) and bool((results[0] == 7).all())


def form(options: Found, device: torch.device, steps: int) -> Found:
    """Steps of one form, captured and launch by launch: they give the same tokens."""
    size = ModelSize(2, 64, 128, 4, 2, 16, 256)
    ids = torch.randint(1, 256, (2, 100), generator=torch.Generator().manual_seed(0)).to(device)

    @torch.inference_mode()
    def tokens(replay: bool) -> tuple[torch.Tensor, int]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = size.build(torch.float32, device)
        specache_fx.compile(model, replay=replay, **SMALL, **options)
        out, found = model(ids, use_cache=True), []
        for _ in range(steps):
            found.append(out.logits[:, -1:].argmax(-1))
            out = model(found[-1], past_key_values=out.past_key_values, use_cache=True)
        return torch.cat(found, 1), specache_fx.stats(out.past_key_values).replayed_steps

    (ran, _), (captured, replayed) = tokens(False), tokens(True)
    same = torch.equal(ran, captured)
    return {"replayed_steps": replayed, "same": same, "ok": same and (replayed > 0 or device.type == "cpu")}


def captures_in_a_row(device: torch.device) -> Found:
    """Captures of one session, of which each replaces the last one, as when an arena grows."""
    recorder = CudaRecorder(device)
    right = [_captures_well(recorder, device) for _ in range(4)]
    return {"ok": all(right)}


def failed_captures(device: torch.device) -> Found:
    """Captures that fail: the stream, the allocator, the generators and the next capture are as before."""
    recorder, here = CudaRecorder(device), torch.ones(1000, device=device)
    beside, before = cuda_streams.lend(recorder, device), torch.cuda.current_stream(device)

    def leaves_a_stream() -> list[torch.Tensor]:
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            return [here + 1]

    def fails() -> list[torch.Tensor]:
        torch.rand(4, device=device)
        raise ValueError("by itself")

    found: Found = {}
    for name, run in {
        "sync": lambda: [here + float(here.sum())],
        "unjoined": leaves_a_stream,
        "error": fails,
    }.items():
        try:
            recorder.record(run, _nothing)
            found[name] = "it was captured"
        except NotCapturedError as error:
            found[name] = str(error)[:200]
        found[f"{name}: next"] = _captures_well(recorder, device)
    found["stream"] = torch.cuda.current_stream(device) == before
    found["random"] = bool((torch.rand(100, device=device) < 1).all())  # a generator in a capture raises
    if device.type == "cuda":
        torch.cuda.empty_cache()
        low = torch.cuda.memory_reserved(device)
        torch.empty(1 << 28, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()  # frees nothing while a capture is under way
        found["freed"] = torch.cuda.memory_reserved(device) <= low
    captured = "it was captured" in found.values()
    return found | {"ok": not captured and all(x for x in found.values() if isinstance(x, bool))}


def threads(device: torch.device) -> Found:
    """Captures beside a thread that waits for the device, allocates and copies on a stream of its own."""
    recorder, ended, failed = CudaRecorder(device), threading.Event(), list[str]()
    waits = 0

    def disturb() -> None:
        nonlocal waits
        stream = cuda_streams.lend(ended, device)
        host = torch.ones(1 << 16, pin_memory=device.type == "cuda")
        while not ended.is_set():
            try:
                with torch.cuda.stream(stream):
                    host.to(device, non_blocking=True).add_(1)
                cuda_streams.synchronize(device)
                waits += 1
            except RuntimeError as error:
                failed.append(str(error)[:200])
                return

    thread = threading.Thread(target=disturb)
    thread.start()
    wrong = 0
    for _ in range(_CAPTURES):
        try:
            wrong += not _captures_well(recorder, device, 0.005)
        except NotCapturedError as error:
            failed.append(str(error)[:200])
    ended.set()
    thread.join()
    return {"waits": waits, "failed": failed[:3], "wrong": wrong, "ok": not failed and not wrong}


def costs(device: torch.device) -> Found:
    """Milliseconds of a capture of 100 operators: ours, and `torch.cuda.graph` with its waits."""
    recorder, here = CudaRecorder(device), torch.ones(1000, device=device)

    def run() -> list[torch.Tensor]:
        out = here
        for _ in range(100):
            out = out + 1
        return [out]

    def torchs() -> None:
        torch.empty(1 << 26, dtype=torch.uint8, device=device)  # for the cache, which it empties
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            run()

    def ours() -> None:
        torch.empty(1 << 26, dtype=torch.uint8, device=device)
        recorder.record(run, _nothing)

    stream = cuda_streams.lend(recorder, device)
    found: Found = {}
    for name, work in {"ours_ms": ours, "torchs_ms": torchs}.items():
        times = []
        for _ in range(10):
            cuda_streams.synchronize(device)
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = round(sorted(times)[5], 3)
    return found


def refused_memory(device: torch.device) -> Found:
    """A registration that CUDA refuses: no later check raises its error."""
    block = PinnedStore(None, device).allocate((1 << 20,), torch.uint8)
    found: Found = {"pinned": block.is_pinned() or device.type == "cpu"}
    try:
        cudart.register(block.data_ptr(), block.nbytes, device)  # it is registered already
        found["refusal"] = None
    except OSError as error:
        found["refusal"] = str(error)
    found["last_error"] = cudart.library().cudaGetLastError()
    total = float(torch.ones(3, device=device).sum())
    return found | {
        "ok": found["pinned"] and bool(found["refusal"]) and not found["last_error"] and total == 3
    }


def forked_memory(device: torch.device) -> Found:
    """What the parent of a process writes to locked pages while that lives is what the device reads."""
    block = PinnedStore(None, device).allocate((1 << 20,), torch.uint8).fill_(1)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    block.fill_(2)
    seen = block.to(device, copy=True, non_blocking=True)
    right = bool((seen == 2).all())
    os.close(writer)
    os.waitpid(child, 0)
    os.close(reader)
    return {"ok": right}


def second_device(first: torch.device) -> Found:
    """Captures on each further device, after one on the first; and whose context a thread that reserves makes."""
    _captures_well(CudaRecorder(first), first)
    count, found = torch.cuda.device_count(), {}
    for index in range(1, count):
        device = torch.device("cuda", index)
        found[str(device)] = _captures_well(CudaRecorder(device), device)
        cache = HostCache(1, [(1, 8, 8)], torch.float32, "pinned", block_tokens=64, device=device)
        for _ in range(6):
            rows = torch.ones(1, 1, 64, 8, device=device)
            cache.append(0, rows, rows)
        found[f"{device}: rows"] = bool((cache.read(0, 0, 384)[0] == 1).all())
        cache.close()
    return found | {"devices": count, "ok": all(found.values())}


def checks(device: torch.device, quick: bool) -> dict[str, Callable[[], Found]]:
    """All of them by name, the shortest first; of a CPU those that need no CUDA."""
    steps = 12 if quick else 40
    found: dict[str, Callable[[], Found]] = {}
    if device.type == "cuda":
        found = {
            name: partial(check, device)
            for name, check in {
                "captures in a row": captures_in_a_row,
                "failed captures": failed_captures,
                "threads": threads,
                "costs": costs,
                "refused memory": refused_memory,
                "forked memory": forked_memory,
                "second device": second_device,
            }.items()
        }
    forms = dict(list(FORMS.items())[:2]) if quick else FORMS
    return found | {f"form {name}": partial(form, options, device, steps) for name, options in forms.items()}
