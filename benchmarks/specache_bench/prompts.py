"""Prompts and turns that run as the model is, beside traced ones: `specache-bench starts prompts`.

Each way is a process of its own, with random weights of SmolLM2's shape. It reads a prompt and a further turn on a long
cache, several times; the first time is not counted, as graphs are made then. Memory: by how much the process's peak
exceeds what it held before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import specache_fx
from specache_bench.speed import SIZES
from specache_bench.starts import in_process
from specache_fx.cli.quiet import quiet

PROMPT, CONTEXT, TURN, REPEATS = 4096, 16384, 64, 3
UNCOMPILED = "uncompiled"
WAYS = (UNCOMPILED, "auto", "traced")  # what `prompts` is, of `specache_fx.compile`


def prompts(size: str, threads: int, way: Any) -> dict[str, dict[str, float]]:
    """One process: medians of seconds and of MiB, by call."""
    with quiet(threads), torch.inference_mode():
        model: Any = SIZES[size].build(torch.bfloat16, torch.device("cpu"))
        if way != UNCOMPILED:
            specache_fx.compile(model, prompts=way)
        ids = torch.randint(model.config.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0))

        def read(ids: torch.Tensor, past: Any = None) -> Any:
            return model(
                input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1
            ).past_key_values

        found = {f"prompt of {PROMPT:,}": _measured(lambda: read(ids[:, :PROMPT]))}
        past = None
        for piece in ids.split(PROMPT, dim=1):
            past = read(piece, past)
        return found | {f"turn of {TURN} on {CONTEXT:,}": _measured(lambda: read(ids[:, :TURN], past))}


def _measured(call: Callable[[], Any]) -> dict[str, float]:
    times, peaks = [], []
    for _ in range(1 + REPEATS):
        before = _reset_peak()
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
        peaks.append(_status("VmHWM") - before)
    return {"seconds": median(times[1:]), "peak_mib": median(peaks[1:])}


def _reset_peak() -> float:
    """Set the peak to what the process holds, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    """A size of this process, in MiB."""
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(kib) / 1024


def measure(threads: int, rounds: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Rows by way and call, medians of the rounds; as `results/prompts.json`."""
    runs: dict[str, list[dict[str, dict[str, float]]]] = {way: [] for way in WAYS}
    for way in [*WAYS] * rounds:  # in turn: the machine's speed moves
        runs[way].append(in_process(prompts, "smollm2", threads, way))
        say(f"{way}: {runs[way][-1]}")
    rows = [
        {"method": way, "call": call}
        | {name: median(run[call][name] for run in found) for name in found[0][call]}
        for way, found in runs.items()
        for call in found[0]
    ]
    return {"settings": {"threads": threads, "rounds": rounds, "repeats": REPEATS}, "rows": rows}
