"""A profile of three decode steps: launches of a step, and the share of it in which the device has nothing to do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from benchmarks.gpu.caches import METHODS, make_cache
from benchmarks.gpu.decoder import Decoder, sync
from benchmarks.gpu.run import Run
from benchmarks.gpu.shapes import SHAPES

_STEPS = 3
_MOST_NAMES = 12


def profile(run: Run, found: dict[str, Any]) -> None:
    """By method, at batch 1."""
    shape = SHAPES["tiny" if run.quick else "llama-3.1-8b"].cut(8)
    tokens = 200 if run.quick else 32768
    found |= {"model": shape.name, "layers": shape.num_layers, "context": tokens, "steps": _STEPS}
    decoder = Decoder(shape, run.device, run.dtype)
    for method in METHODS:
        entry: dict[str, Any] = {}
        found[method] = entry
        run.attempt(entry, lambda method=method, entry=entry: _profile(run, decoder, method, tokens, entry))  # type: ignore[misc]


def _profile(run: Run, decoder: Decoder, method: str, tokens: int, entry: dict[str, Any]) -> None:
    cache = make_cache(method, decoder.shape, 1, tokens, run.device, run.dtype)
    cuda = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    try:
        token = torch.zeros(cache.lanes, 1, dtype=torch.int64, device=run.device)
        with torch.inference_mode():
            for _ in range(4):
                token = decoder.step(token, cache)
            sync(run.device)
            with profiled(activities=activities) as prof:
                for _ in range(_STEPS):
                    token = decoder.step(token, cache)
                sync(run.device)
    finally:
        cache.close()
    events = [
        event for event in prof.events() if event.device_type == (DeviceType.CUDA if cuda else DeviceType.CPU)
    ]
    names = Counter(event.name[:60] for event in events)
    entry["launches_a_step" if cuda else "operators_a_step"] = round(len(events) / _STEPS, 1)
    entry["most"] = {name: round(count / _STEPS, 1) for name, count in names.most_common(_MOST_NAMES)}
    busy, end, begin = 0.0, float("-inf"), min(event.time_range.start for event in events)
    for event in sorted(events, key=lambda event: event.time_range.start):
        busy += max(event.time_range.end - max(event.time_range.start, end), 0.0)
        end = max(end, event.time_range.end)
    entry["us_a_step"] = round((end - begin) / _STEPS, 1)
    entry["idle_share"] = round(1 - busy / max(end - begin, 1e-9), 4)
