"""Times to the first token from a saved cache, each start in a process of its own: `specache-bench starts saved`.

A question about a document that was read and saved before, beside reading it anew, after a question about another
document, so that nothing is left to compile. Loading the model is not counted; loading a cache is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import specache_fx
from specache_bench.lab import Lab
from specache_bench.workloads import read_windows
from specache_fx.cli.quiet import quiet
from specache_fx.errors import ConfigError
from specache_fx.saved import fingerprint
from specache_fx.saved.saving import FILE

CONTEXT, QUESTION, NEW_TOKENS, ASKS = 4096, 16, 32, 5
READS, IN_MEMORY, ON_DISK = "reads all", "loads, file in memory", "loads, file on disk"


class Clock:
    """A streamer of `generate`, which puts the prompt into it and then each token: when each came."""

    def __init__(self) -> None:
        self.begun, self.seconds = time.perf_counter(), list[float]()

    def put(self, tokens: torch.Tensor) -> None:
        """Note the time."""
        self.seconds.append(time.perf_counter() - self.begun)

    def end(self) -> None:
        """Nothing is left to do."""


def _generate(model: Any, ids: torch.Tensor, count: int, past: Any = None) -> tuple[Clock, list[int]]:
    clock = Clock()
    mask, given = torch.ones_like(ids), {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    out = model.generate(ids, attention_mask=mask, past_key_values=past, streamer=clock, **given)
    return clock, out[0, ids.shape[1] :].tolist()


def saved_start(model: str, threads: int, start: str, folder: str) -> dict[str, Any]:
    """One process: `start` is READS, IN_MEMORY, ON_DISK, or "saves"."""
    with quiet(threads), Lab(model) as lab, torch.inference_mode():
        specache_fx.compile(lab.model)
        texts = read_windows(lab, "austen", CONTEXT + QUESTION, 2, seed=0)
        other, ids = (text[None] for text in texts)
        past = None if start == READS else lab.model(other[:, :CONTEXT], use_cache=True).past_key_values
        _generate(lab.model, other, NEW_TOKENS, past)
        path = Path(folder) / FILE
        if start == "saves":
            past = lab.model(ids[:, :CONTEXT], use_cache=True).past_key_values
            begun = time.perf_counter()
            specache_fx.save(past, folder, input_ids=ids[:, :CONTEXT])
            found: dict[str, Any] = {
                "save_seconds": time.perf_counter() - begun,
                "file_bytes": path.stat().st_size,
            }
            stats = specache_fx.stats(past)
            found |= {"device_bytes": stats.device_bytes, "host_used_bytes": stats.host_used_bytes}
            return found | {"tokens": _generate(lab.model, ids, NEW_TOKENS, past)[1]}
        asks = []
        for _ in range(1 if start == READS else ASKS):
            past = None
            if start == ON_DISK:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            fingerprint.clear_digests()
            begun = time.perf_counter()
            if start != READS:
                past = specache_fx.load(lab.model, folder, input_ids=ids)
            loaded = time.perf_counter() - begun
            nbytes = None if past is None else specache_fx.stats(past).device_bytes
            clock, tokens = _generate(lab.model, ids, NEW_TOKENS, past)
            first = clock.begun + clock.seconds[1] - begun
            asks.append({"first_token": first, "load": loaded, "device_bytes": nbytes, "tokens": tokens})
        return {"asks": asks}


def in_process(function: Callable[..., Any], *arguments: object, **environment: str) -> Any:
    """A module's function in a process of its own; a `ConfigError` with its last words if it fails."""
    code = f"import json, sys; from {function.__module__} import {function.__name__} as run\n"
    code += "print(json.dumps(run(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))"
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    given = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=given, check=False, capture_output=True, text=True)
    if done.returncode:
        *_, last = ["without a word", *done.stderr.strip().splitlines()]
        raise ConfigError(f"{function.__name__} {' '.join(command[3:])} ended: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_saved(model: str, threads: int, rounds: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Rows by start, medians of all asks; as `results/saved.json`."""
    times: dict[str, list[dict[str, Any]]] = {start: [] for start in (READS, IN_MEMORY, ON_DISK)}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # /tmp may be memory
        saved = in_process(saved_start, model, threads, "saves", folder)
        stayed = saved.pop("tokens")
        for start in [*times] * rounds:  # in turn: the machine's speed moves
            for found in in_process(saved_start, model, threads, start, folder)["asks"]:
                found["tokens_equal"] = found.pop("tokens") == stayed
                times[start].append(found)
                say(f"{start}: {found}")
    rows = [
        {
            "start": start,
            "first_token_seconds": median(each["first_token"] for each in found),
            "load_seconds": None if start == READS else median(each["load"] for each in found),
            "device_bytes": found[0]["device_bytes"],
            "tokens_equal": all(each["tokens_equal"] for each in found),
            "all_first_token_seconds": [each["first_token"] for each in found],
        }
        for start, found in times.items()
    ]
    settings = {"model": model, "context": CONTEXT, "question": QUESTION, "new_tokens": NEW_TOKENS}
    return {
        "settings": settings | {"rounds": rounds, "asks": ASKS, "threads": threads},
        "saved": saved,
        "rows": rows,
    }
