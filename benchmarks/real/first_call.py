"""How long the first calls of a trained model take: `python -m benchmarks.real.first_call`.

Each start is a process of its own: the first with empty caches, the second with those that the first has left. The
model uncompiled, and under `torch.compile` alone, are timed beside them. So is `torch.compile(backend="eager")`: Dynamo
traces the model, and nothing is compiled. No backend can be ready sooner. Loading the model is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import specache_fx
from benchmarks.real.runs import TEXT
from specache_fx.eval.bench import Bench
from specache_fx.eval.real import text_file
from specache_fx.eval.real.cache import cache_folder
from specache_fx.eval.text import read_windows
from specache_fx.provenance import provenance
from specache_fx.quiet import quiet

PROMPT_LEN, NEW_TOKENS = 512, 5
CALLS = {
    "first": PROMPT_LEN,
    "second": PROMPT_LEN,
    "another_length": PROMPT_LEN + 88,
    "a_third_length": PROMPT_LEN + 188,
}
METHODS = ("uncompiled", "torch.compile", "dynamo alone", "specache")


class Clock:
    """A streamer of `generate`, which puts the prompt into it and then each token: when each came."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.seconds: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Note the time."""
        self.seconds.append(time.perf_counter() - self.begun)

    def end(self) -> None:
        """Nothing is left to do."""


def time_calls(model: str, threads: int, method: str) -> dict[str, Any]:
    """Seconds to the first token and to the fifth: of a first call, of a second, and of two longer prompts."""
    with quiet(threads), Bench(model) as bench, torch.inference_mode():
        prompts = read_windows(bench.tokenizer, text_file(TEXT), 2 * PROMPT_LEN, 4, seed=0)
        if method == "specache":
            specache_fx.compile(bench.model)
        elif method == "torch.compile":
            bench.model.compile()
        elif method == "dynamo alone":
            bench.model.compile(backend="eager")
        found = {}
        for (name, length), whole in zip(CALLS.items(), prompts, strict=True):
            prompt = whole[:length]
            clock = Clock()
            bench.model.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                streamer=clock,
            )
            found[f"{name}_call"] = {
                "first_token": clock.seconds[1],
                "fifth_token": clock.seconds[NEW_TOKENS],
            }
        return found | {"layers": bench.model.config.get_text_config().num_hidden_layers}


def start(model: str, threads: int, method: str, caches: Path) -> dict[str, Any]:
    """The same in a process of its own, whose compilers keep what they make in `caches`."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    environment |= {"XDG_CACHE_HOME": str(caches)}
    # Models are where they are kept, not below this cache.
    environment.setdefault("SPECACHE_DATA", str(cache_folder()))
    arguments = [model, str(threads), method]
    code = (
        "import json, sys; from benchmarks.real.first_call import time_calls\n"
        "print(json.dumps(time_calls(sys.argv[1], int(sys.argv[2]), sys.argv[3])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Names of `make models`.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    out: Annotated[Path, typer.Option(help="The JSON.")] = Path("results/real_first_call.json"),
) -> None:
    """Measure, and write one JSON."""
    rows = []
    for model in models or ["smollm2", "gemma3"]:
        for method in METHODS:
            starts = ["uncompiled"] if method == "uncompiled" else ["empty caches", "second process"]
            with tempfile.TemporaryDirectory() as folder:
                for start_is in starts:
                    row = {"model": model, "method": method, "start": start_is}
                    row |= start(model, threads, method, Path(folder))
                    rows.append(row)
                    print(row, flush=True)  # noqa: T201
    report = provenance(torch.device("cpu")) | {
        "command": " ".join(["python -m benchmarks.real.first_call", *(models or [])]),
        "settings": {"prompt_len": PROMPT_LEN, "new_tokens": NEW_TOKENS, "threads": threads},
        "rows": rows,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
