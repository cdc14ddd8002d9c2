"""Time to first token of a long prompt, read anew and from a saved cache: `python -m benchmarks.saved`.

One process reads the document, saves its cache and answers from it. Every other start is a new process that answers a
question about it, a few times: it reads all, or loads the cache and reads the question. The time is from the call to
the first token. Loading is in it, each time: the weights' fingerprint, the file's digests, the copies. Loading the
model is not, nor compiling: each process has answered about another document before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import specache_fx
from benchmarks.real.first_call import Clock
from benchmarks.real.runs import TEXT
from specache_fx import fingerprint
from specache_fx.eval.bench import Bench
from specache_fx.eval.real import text_file
from specache_fx.eval.text import read_windows
from specache_fx.provenance import provenance
from specache_fx.quiet import quiet
from specache_fx.saving import FILE

CONTEXT, QUESTION, NEW_TOKENS, ROUNDS = 4096, 16, 32, 3
ASKS = 5  # of a process that loads; one that reads asks once a process
STARTS = ("reads all", "loads, file in memory", "loads, file on disk")


def answer(model: Any, ids: torch.Tensor, past: Any, begun: float) -> tuple[float, list[int]]:
    """Seconds from `begun` to the first token, and all tokens."""
    clock = Clock()
    clock.begun = begun
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=past,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        streamer=clock,
    )
    return clock.seconds[1], out[0, ids.shape[1] :].tolist()


def time_start(model: str, threads: int, start: str, folder: str) -> dict[str, Any]:
    """One process: `start` is one of `STARTS`, or "saves"."""
    with quiet(threads), Bench(model) as bench, torch.inference_mode():
        specache_fx.compile(bench.model)
        texts = read_windows(bench.tokenizer, text_file(TEXT), CONTEXT + QUESTION, 2, seed=0)
        other, ids = (text[None] for text in texts)
        # As long, so that nothing is left to compile for the call that counts.
        reads = start == STARTS[0]
        past = None if reads else bench.model(other[:, :CONTEXT], use_cache=True).past_key_values
        answer(bench.model, other, past, 0.0)
        path = Path(folder) / FILE
        if start == "saves":
            past = bench.model(ids[:, :CONTEXT], use_cache=True).past_key_values
            begun = time.perf_counter()
            specache_fx.save(past, folder, input_ids=ids[:, :CONTEXT])
            saved = time.perf_counter() - begun
            stats = specache_fx.stats(past)
            _, tokens = answer(bench.model, ids, past, 0.0)
            return {
                "save_seconds": saved,
                "file_bytes": path.stat().st_size,
                "device_bytes": stats.device_bytes,
                "host_used_bytes": stats.host_used_bytes,
                "tokens": tokens,
            }
        asks = []
        for _ in range(1 if reads else ASKS):
            past = None
            if start == STARTS[2]:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            fingerprint.clear_digests()
            begun = time.perf_counter()
            if not reads:
                past = specache_fx.load(bench.model, folder, input_ids=ids)
            loaded = time.perf_counter() - begun
            nbytes = None if past is None else specache_fx.stats(past).device_bytes
            first, tokens = answer(bench.model, ids, past, begun)
            asks.append({"first_token": first, "load": loaded, "device_bytes": nbytes, "tokens": tokens})
        return {"asks": asks}


def run(model: str, threads: int, start: str, folder: Path) -> dict[str, Any]:
    """The same in a process of its own."""
    code = (
        "import json, sys; from benchmarks.saved import time_start\n"
        "print(json.dumps(time_start(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))"
    )
    command = [sys.executable, "-c", code, model, str(threads), start, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    model: Annotated[str, typer.Option(help="Name of `make models`.")] = "smollm2",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    rounds: Annotated[int, typer.Option(help="Processes of each kind.")] = ROUNDS,
    out: Annotated[Path, typer.Option(help="The JSON.")] = Path("results/saved.json"),
) -> None:
    """Measure, and write one JSON."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # /tmp may be memory
        saved = run(model, threads, "saves", Path(folder))
        stayed = saved.pop("tokens")
        times: dict[str, list[dict[str, Any]]] = {start: [] for start in STARTS}
        for _ in range(rounds):  # in turn: the machine's speed moves
            for start in STARTS:
                for found in run(model, threads, start, Path(folder))["asks"]:
                    found["tokens_equal"] = found.pop("tokens") == stayed
                    times[start].append(found)
                    print(start, found, flush=True)  # noqa: T201
    rows = [
        {
            "start": start,
            "first_token_seconds": statistics.median(each["first_token"] for each in found),
            "load_seconds": None if start == STARTS[0] else statistics.median(each["load"] for each in found),
            "device_bytes": found[0]["device_bytes"],
            "tokens_equal": all(each["tokens_equal"] for each in found),
            "all_first_token_seconds": [each["first_token"] for each in found],
        }
        for start, found in times.items()
    ]
    report = provenance(torch.device("cpu")) | {
        "command": "python -m benchmarks.saved",
        "settings": {
            "model": model,
            "context": CONTEXT,
            "question": QUESTION,
            "new_tokens": NEW_TOKENS,
            "rounds": rounds,
            "asks": ASKS,
            "threads": threads,
        },
        "saved": saved,
        "rows": rows,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
