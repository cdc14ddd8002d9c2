"""The pauses of a chat: `specache-bench starts chat`.

One process makes ten calls of `generate()` on one model: prompts of several lengths, turns on a kept cache, padded
rows, sampling, beams, a static cache. Of each call: seconds to its first token, the longest wait between two later
tokens, and CPU seconds of the process and its children. The model is loaded before; compiling it counts. Our C++
libraries are there, as a wheel brings them.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import specache_fx
from specache_bench.fetch import VARIABLE, cache_folder
from specache_bench.lab import Lab
from specache_bench.starts import in_process
from specache_bench.workloads import read_windows
from specache_fx.cli.quiet import quiet
from specache_fx.runtime.native.library_cache import user_folder

NEW_TOKENS = 16
_LONGEST = 1500
_TURN = 24  # tokens of a further question
UNCOMPILED, TORCH, WARMED = "uncompiled", "torch.compile", "specache, warmed up"
TRACED = "specache, traced prompts"
ONCE = (TORCH, TRACED, WARMED)  # they take minutes
# Options of ours; the plain model, and torch's own compiler, have none.
WAYS: dict[str, dict[str, Any]] = {
    UNCOMPILED: {},
    TORCH: {},
    "specache": {},
    "specache, in the background": {"warm": "background"},
    TRACED: {"prompts": "traced"},
    WARMED: {},
}
WARM_UP = "warm_up"  # the call beforehand, for batches of 1, 2 and 3
FIGURES = ("first_token", "longest_wait", "seconds", "cpu_seconds")


class Clock(LogitsProcessor):
    """Notes when the logits of each token are known; beams have no streamer that could."""

    def __init__(self) -> None:
        self.begun, self.seconds, self.cpu = time.perf_counter(), list[float](), cpu_seconds()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change nothing."""
        self.seconds.append(time.perf_counter() - self.begun)
        return scores

    def figures(self) -> dict[str, float]:
        """See the module; `seconds` are of the whole call."""
        waits = [later - earlier for earlier, later in pairwise(self.seconds)]
        ended = time.perf_counter() - self.begun
        return dict(zip(FIGURES, (self.seconds[0], max(waits), ended, cpu_seconds() - self.cpu), strict=True))


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def chat(model: str, threads: int, way: str) -> dict[str, dict[str, float]]:
    """The calls of one process, by their names."""
    with quiet(threads), Lab(model) as lab, torch.inference_mode():
        if way == TORCH:
            lab.model.compile()
        elif way != UNCOMPILED:
            specache_fx.compile(lab.model, **WAYS[way])
        warm = {WARM_UP: _warm_up(lab)} if way == WARMED else {}
        return warm | dict(_calls(lab))


def _warm_up(lab: Lab) -> dict[str, float]:
    clock = Clock()
    specache_fx.warm_up(lab.model, batch_sizes=(1, 2, 3))
    return {"seconds": time.perf_counter() - clock.begun, "cpu_seconds": cpu_seconds() - clock.cpu}


def _calls(lab: Lab) -> Iterator[tuple[str, dict[str, float]]]:
    texts = read_windows(lab, "austen", _LONGEST, 4, seed=0)

    def run(
        ids: torch.Tensor, mask: torch.Tensor | None = None, **given: Any
    ) -> tuple[Any, dict[str, float]]:
        clock = Clock()
        out = lab.model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            logits_processor=LogitsProcessorList([clock]),
            **{"do_sample": False, **given},
        )
        return out, clock.figures()

    def padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        columns = torch.arange(max(lengths))
        mask = torch.stack([columns >= max(lengths) - length for length in lengths]).long()
        return texts[: len(lengths), : max(lengths)] * mask, mask

    out, figures = run(texts[:1, :512])
    yield "first prompt (512)", figures
    yield "another length (1,500)", run(texts[1:2])[1]
    yield "a shorter one (260)", run(texts[2:3, :260])[1]
    for turn in ("next turn", "third turn"):
        ids = torch.cat([out.sequences, texts[3:4, :_TURN]], dim=1)
        out, figures = run(ids, past_key_values=out.past_key_values)
        yield f"{turn} on the kept cache", figures
    yield "three padded prompts", run(*padded(512, 170, 9))[1]
    yield "the same, other lengths", run(*padded(350, 90, 6))[1]
    yield "sampling", run(texts[2:3, :260], do_sample=True)[1]
    yield "two beams", run(texts[2:3, :260], num_beams=2)[1]
    yield "static cache", run(texts[2:3, :260], cache_implementation="static")[1]


def _starts(way: str) -> tuple[str, ...]:
    """The processes of a way that follow each other over the same caches of files."""
    return ("uncompiled",) if way == UNCOMPILED else ("empty caches", "later process")


def measure(
    models: list[str], threads: int, rounds: int, ways: Iterable[str], say: Callable[[str], object]
) -> dict[str, Any]:
    """Rows by model, way, start and call, medians of the rounds (of `ONCE`: one); as `results/chat.json`."""
    rows = []
    libraries = list(user_folder().glob("*.so"))
    for model in models:
        for way in ways:
            found: dict[str, list[dict[str, dict[str, float]]]] = {}
            for _ in range(1 if way in ONCE else rounds):
                with tempfile.TemporaryDirectory() as folder:
                    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": folder}
                    caches |= {VARIABLE: str(cache_folder())}  # models are where they are kept
                    ours = Path(folder) / user_folder().name
                    ours.mkdir(mode=0o755)
                    for library in libraries:
                        shutil.copy2(library, ours)
                    for start in _starts(way):
                        calls = in_process(chat, model, threads, way, **caches)
                        found.setdefault(start, []).append(calls)
                        total = sum(call["cpu_seconds"] for call in calls.values())
                        say(f"{model}, {way}, {start}: {total:.0f} CPU seconds")
            for start, runs in found.items():
                for call in runs[0]:
                    figures = {name: median(run[call][name] for run in runs) for name in runs[0][call]}
                    rows.append({"model": model, "method": way, "start": start, "call": call} | figures)
    return {"settings": {"new_tokens": NEW_TOKENS, "threads": threads, "rounds": rounds}, "rows": rows}
