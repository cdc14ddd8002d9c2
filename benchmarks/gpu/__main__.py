"""What a GPU shows, in one run of nine minutes: `python -m benchmarks.gpu`, from the root of a checkout.

`STAGES` is the order. Each stage is a process with a time limit of its own: one that hangs, crashes or runs out of
memory costs the others nothing. The JSON is written after each measurement; errors are in it, and are not fatal.

Weights are random, of Llama-3.1-8B's shape. Keys are random too, so that hardly a staged row is wanted twice: the
transfers are the largest there can be.

`--quick` runs all of it with tiny shapes on any machine: to try the script, not to measure. On a machine without an
index: `pip install --no-index --no-deps --no-build-isolation -e .` first.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
# Seconds that each stage may take.
STAGES = {
    "environment": 40,
    "smoke": 150,
    "checks": 60,
    "kernels": 45,
    "profile": 45,
    "latency": 90,
    "model": 90,
    "graphs": 45,
    "batches": 90,
    "tests": 120,
}
_KILL_AFTER = 5.0  # a stage that has no time left should end by itself


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("results/gpu.json"),
    minutes: Annotated[float, typer.Option(help="Time for all stages.")] = 9.0,
    only: Annotated[list[str] | None, typer.Option(help="Stages to run; may be given several times.")] = None,
    most: Annotated[float, typer.Option(help="Seconds that a stage may take at most.")] = 600.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny shapes on any machine: tries the script.")
    ] = False,
) -> None:
    """Measure, and write one JSON."""
    if importlib.util.find_spec("specache_fx.runtime") is None:
        raise typer.BadParameter(
            "specache_fx is not installed: its folders are no package by themselves. Run pip install --no-index"
            " --no-deps --no-build-isolation -e . first."
        )
    if unknown := set(only or ()) - set(STAGES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: the stages are {', '.join(STAGES)}.")
    if not quick and not has_gpu():
        raise typer.BadParameter("There is no CUDA device: --quick tries the script without one.")
    start = time.perf_counter()
    record: dict[str, Any] = {"quick": quick, "stages": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, seconds in STAGES.items():
        if only and name not in only:
            continue
        left = 60 * minutes - (time.perf_counter() - start)
        record["stages"][name] = run_stage(name, min(seconds, most, left), quick, out)
        record["seconds"] = round(time.perf_counter() - start, 1)
        out.write_text(json.dumps(record, indent=1) + "\n")
        typer.echo(f"{name}: {_summary(record['stages'][name])}")


def has_gpu() -> bool:
    """Whether PyTorch sees one. Asked in another process: this one takes no memory of it."""
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asks], check=False).returncode == 0


def run_stage(name: str, seconds: float, quick: bool, out: Path) -> dict[str, Any]:
    """Run one stage in a process of its own, and give what it had found when it ended or was ended."""
    if seconds <= 0:
        return {"skipped": "no time was left"}
    partial = out.with_suffix(f".{name}.json")
    partial.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.stage", name, str(partial), str(seconds)]
    start = time.perf_counter()
    error = None
    try:
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + min(_KILL_AFTER, seconds),
        )
        if done.returncode:
            error = f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        error = f"it was ended after {seconds:.1f} s"
    found: dict[str, Any] = json.loads(partial.read_text()) if partial.exists() else {}
    partial.unlink(missing_ok=True)
    if error is not None:
        found["error"] = error
    found["seconds"] = round(time.perf_counter() - start, 2)
    return found


def _summary(found: dict[str, Any]) -> str:
    """One line for whoever watches."""
    text = json.dumps(found)
    failed = text.count('"error"') + text.count('"ok": false') + text.count('"equal": false')
    return f"{found.get('seconds', 0)} s, {failed} failures{', ' + found['error'][-300:] if 'error' in found else ''}"


if __name__ == "__main__":
    typer.run(main)
