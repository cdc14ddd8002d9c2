"""Everything that a GPU shows, in one run of ten minutes: `python -m specache_bench.gpu`, on a bare machine too.

Bare: torch, transformers, Triton and their needs, without an index; pytest, hypothesis and setuptools for `tests`.
There, `pip install --no-index --no-deps --no-build-isolation -e . -e benchmarks` first. `STAGES` is the order. Each
stage is a process with a time limit of its own: one that hangs, crashes or runs out of memory costs the others nothing.
The JSON is written after each measurement; errors are in it, and are not fatal. `--quick` runs all of it with tiny
shapes on any machine: to try the script.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

import specache_fx
from specache_bench import gpu_checks
from specache_bench.records import Method
from specache_bench.speed import SIZES, Attention, DecodeSteps, ModelSize
from specache_bench.timing import memory_bandwidth, seconds_of
from specache_fx.cli.provenance import provenance
from specache_fx.compiled import uncompile
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.native import triton_ops

ROOT = Path(__file__).resolve().parents[2]
TINY = ModelSize(2, 32, 64, 4, 2, 16, 64)
# Nothing is compiled by Inductor: a run starts at once, and the decode step is a CUDA graph all the same.
METHODS = {
    "transformers": Method.of("roomy"),
    "kivi-2": Method.of("kivi", bits=2, residual_length=64),
    "specache-2": Method.of("specache", bits=2),
    "specache-2-corrected": Method.of("specache", bits=2, lookahead="token", key_share=2**-9),
    "specache-1": Method.of("specache", bits=1),
}
Found = dict[str, Any]


@dataclass
class Run:
    """One stage: where, with tiny shapes or not, its seconds, the file of its record; and the record."""

    device: torch.device
    quick: bool
    seconds: float
    path: Path
    record: Found = field(default_factory=dict)
    _start: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self._start)

    @property
    def dtype(self) -> str:
        """Of weights and cache."""
        return "bfloat16" if self.device.type == "cuda" else "float32"

    def attempt(self, name: str, work: Callable[[], Any], within: str | None = None) -> None:
        """Do something that may fail: its result or its error goes into the record under a name, and to disk."""
        record = self.record if within is None else self.record.setdefault(within, {})
        found: Found = record.setdefault(name, {}) if name else record
        try:
            found.update((work() or {}) if self.left > 0 else {"skipped": "no time was left"})
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            found["traceback"] = traceback.format_exc().splitlines()[-6:]
        with contextlib.suppress(RuntimeError):  # a device that an error has broken
            self.free()
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(self.record))
        whole.replace(self.path)  # who is ended while it writes leaves the last record

    def free(self) -> None:
        """Give cached memory back, and count its peak anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        """The most bytes that were allocated since `free`; None on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def steps(self, layers: int, tokens: int, batch: int = 1) -> DecodeSteps:
        """Decode steps of the 8B shape with so many layers behind so many tokens; a group fills once in 64 steps."""
        if self.quick:
            return DecodeSteps(TINY, batch, 200, self.dtype, 1, 2)
        return DecodeSteps(replace(SIZES["8b"], layers=layers), batch, tokens, self.dtype, 1, 72)

    def time(self, steps: DecodeSteps, methods: dict[str, Method], within: str | None = None) -> None:
        """A row for each method, each attempted by itself."""

        def row(name: str) -> Found:
            (found,) = steps.run({name: methods[name]}, self.device)["rows"]
            return {**found, "peak_bytes": self.peak()}

        for name in methods:
            self.attempt(name, partial(row, name), within)


def environment(run: Run) -> None:
    """Device, versions, commit; gigabytes a second within the device, and over the bus either way."""
    run.record |= provenance(run.device)
    size = 1 << (14 if run.quick else 28)
    run.record["device_gb_s"] = round(memory_bandwidth(run.device) / 1e9, 3)
    here = torch.zeros(size, dtype=torch.uint8, device=run.device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=run.device.type == "cuda")
    for name, to, of in (("to_device", here, host), ("from_device", host, here)):
        best = min(seconds_of(partial(to.copy_, of), run.device, 10))
        run.record[f"{name}_gb_s"] = round(of.nbytes / best / 1e9, 3)


def captures(run: Run) -> None:
    """Captures, streams and page-locked memory (`gpu_checks`): whether each is as the simulation has it."""
    for name, check in gpu_checks.checks(run.device, run.quick).items():
        run.attempt(name, check)


def tests(run: Run) -> None:
    """The tests that a GPU runs on itself: the last lines, and whether all passed. Quick: collected alone."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["--collect-only"] if run.quick else []
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=max(run.left - 2, 1)
        )
        run.record |= {"ok": done.returncode == 0, "output": done.stdout.splitlines()[-60:]}
    except subprocess.TimeoutExpired:
        run.record["error"] = "there was no time for all of them"


def attention(run: Run) -> None:
    """The attention kernel against the reference, and its time beside PyTorch's attention, at 64k tokens."""
    missing = triton_ops.unavailable_reason(run.device)
    run.record["triton"] = missing or "here"
    kernel = "triton" if missing is None else "auto"  # in its interpreter on a CPU too
    shape = Attention(1, 4, 2, 16, 200) if run.quick else Attention(kv_len=65536)
    dtype = getattr(torch, run.dtype)

    def check(bits: int, quantizer: str) -> Found:
        # A probability's relative error is that of its score: scores of this size, a few ulps of float32 each.
        out, scores = shape.error(
            SpecacheConfig(bits=bits, quantizer=quantizer, kernel=kernel), dtype, run.device
        )
        ok = out <= max(4 * torch.finfo(dtype).eps, 1e-4) and scores <= 1e-3
        return {"out_error": out, "scores_error": scores, "ok": ok}

    for bits, quantizer in product((1, 2, 4, 8), ("turboquant", "kivi")):
        run.attempt(f"{bits} bit, {quantizer}", partial(check, bits, quantizer))
    rounds = 2 if run.quick else 50
    settings = [2, 1], ["turboquant"], run.device, run.dtype, rounds
    run.attempt("timed", partial(shape.run, *settings, kernel_name=kernel))


def latency(run: Run) -> None:
    """Milliseconds of a step at batch 1 and 64k tokens, by method."""
    run.time(run.steps(32, 65536), METHODS)


def profile(run: Run) -> None:
    """Launches of a step, its slowest kernels, and the share of it in which the device has nothing to do."""
    steps, cuda, count = run.steps(8, 32768), run.device.type == "cuda", 3
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    kind = DeviceType.CUDA if cuda else DeviceType.CPU

    @torch.inference_mode()
    def work(method: Method) -> Found:
        model = steps.size.build(getattr(torch, run.dtype), run.device)
        with steps.opened({"one": method}, model) as opened, profiled(activities=activities) as prof:
            opened["one"].turn(count)
        events = sorted((e for e in prof.events() if e.device_type == kind), key=lambda e: e.time_range.start)
        taken, busy, end = Counter[str](), 0.0, float("-inf")
        for event in events:
            taken[event.name[:60]] += event.time_range.elapsed_us()
            busy += max(event.time_range.end - max(event.time_range.start, end), 0.0)
            end = max(end, event.time_range.end)
        whole = max(end - events[0].time_range.start, 1e-9)
        slowest = {name: round(us / count, 2) for name, us in taken.most_common(12)}
        found = {"launches_a_step": round(len(events) / count, 1), "us_a_step": round(whole / count, 1)}
        return found | {"idle_share": round(1 - busy / whole, 4), "slowest_us": slowest}

    for name, method in METHODS.items():
        run.attempt(name, partial(work, method))


def model(run: Run) -> None:
    """Peak memory and seconds of a prompt of 32k tokens, as users call it, by method."""
    size = TINY if run.quick else replace(SIZES["8b"], layers=4)
    made = size.build(getattr(torch, run.dtype), run.device)
    prompt = torch.randint(0, size.vocab, (1, 100 if run.quick else 32768), device=run.device)

    def prefill(ids: torch.Tensor) -> Any:
        return made(
            ids, attention_mask=torch.ones_like(ids), use_cache=True, logits_to_keep=1
        ).past_key_values

    @torch.inference_mode()
    def measure(options: Found | None) -> Found:
        uncompile(made)
        if options is not None:
            specache_fx.compile(made, lowering="eager", **options)
        for length in (prompt.shape[1] // 4, prompt.shape[1] // 2):  # compiles: one length serves all
            prefill(prompt[:, :length])
        run.free()
        before, pasts = run.peak() or 0, list[Any]()
        (seconds,) = seconds_of(lambda: pasts.append(prefill(prompt)), run.device, 1)
        found = {"prefill_s": seconds, "peak_bytes_over_weights": (run.peak() or before) - before}
        return found | ({} if options is None else {"device_bytes": specache_fx.stats(pasts[0]).device_bytes})

    run.attempt("transformers", partial(measure, None))
    run.attempt("specache-2", partial(measure, {"bits": 2}))
    run.attempt("kivi-2", partial(measure, {"policy": "kivi"}))


def graphs(run: Run) -> None:
    """A step captured in a CUDA graph, and not."""
    methods = {name: Method.of("specache", bits=2, replay=on) for name, on in (("off", False), ("on", True))}
    run.time(run.steps(32, 8192), methods)


def batches(run: Run) -> None:
    """Tokens a second by batch and context (the paper's Table 3)."""
    methods = {name: METHODS[name] for name in ("transformers", "kivi-2", "specache-2")}
    for tokens, batch in product((200,) if run.quick else (8192, 32768), (1, 2) if run.quick else (1, 4, 8)):
        run.time(run.steps(8, tokens, batch), methods, f"{tokens} x {batch}")


# The work of each stage, and the seconds that it may take.
STAGES: dict[str, tuple[Callable[[Run], None], float]] = {
    "environment": (environment, 40),
    "captures": (captures, 60),
    "tests": (tests, 120),
    "attention": (attention, 60),
    "latency": (latency, 90),
    "profile": (profile, 60),
    "model": (model, 60),
    "graphs": (graphs, 60),
    "batches": (batches, 60),
}


def run_stage(name: str, seconds: float, quick: bool, out: Path) -> Found:
    """Run one stage in a process of its own, and give the record as it was when the stage ended or was ended."""
    if seconds <= 0:
        return {"skipped": "no time was left"}
    partial, start, error = out.with_suffix(f".{name}.json"), time.perf_counter(), None
    partial.unlink(missing_ok=True)
    command = [sys.executable, "-m", "specache_bench.gpu", "--stage", name, "--out", str(partial)]
    command += ["--most", str(seconds), *(["--quick"] if quick else [])]
    try:
        limit = seconds + min(5.0, seconds)  # a stage that has no time left should end by itself
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        if done.returncode:
            error = f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        error = f"it was ended after {seconds:.1f} s"
    found: Found = json.loads(partial.read_text()) if partial.exists() else {}
    partial.unlink(missing_ok=True)
    found |= {} if error is None else {"error": error}
    return found | {"seconds": round(time.perf_counter() - start, 2)}


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("results/gpu.json"),
    minutes: Annotated[float, typer.Option(help="Time for all stages.")] = 10.0,
    only: Annotated[list[str] | None, typer.Option(help="Stages to run; may be given several times.")] = None,
    most: Annotated[float, typer.Option(help="Seconds that a stage may take at most.")] = 600.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny shapes on any machine: tries the script.")
    ] = False,
    stage: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, and write one JSON."""
    if unknown := {*(only or ()), *([stage] if stage else [])} - set(STAGES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: the stages are {', '.join(STAGES)}.")
    if stage is not None:
        torch.manual_seed(0)
        run = Run(torch.device("cuda" if torch.cuda.is_available() else "cpu"), quick, most, out)
        run.attempt("", lambda: STAGES[stage][0](run))
        return
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"  # of another process: no memory is taken here
    if not quick and subprocess.run([sys.executable, "-c", asks], check=False).returncode:
        raise typer.BadParameter("There is no CUDA device: --quick tries the script without one.")
    start, record = time.perf_counter(), {"quick": quick, "stages": dict[str, Found]()}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, (_, seconds) in STAGES.items():
        if not only or name in only:
            left = 60 * minutes - (time.perf_counter() - start)
            limit = min(most if quick else seconds, most, left)  # tiny shapes are for slow machines too
            found = record["stages"][name] = run_stage(name, limit, quick, out)  # type: ignore[index]
            record["seconds"] = round(time.perf_counter() - start, 1)
            out.write_text(json.dumps(record, indent=1) + "\n")
            text = json.dumps(found)
            failed = text.count('"error"') + text.count('"ok": false')
            typer.echo(
                f"{name}: {found.get('seconds', 0)} s, {failed} failures {found.get('error', '')[-300:]}"
            )


if __name__ == "__main__":
    typer.run(main)
