"""One stage of `python -m benchmarks.gpu`, in the process that was started for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bandwidth import gather, memory
from benchmarks.gpu.checks import check_kernels
from benchmarks.gpu.decode import batches, graphs, latency
from benchmarks.gpu.kernel_speed import kernels
from benchmarks.gpu.model import whole_model
from benchmarks.gpu.run import Run, environment
from benchmarks.gpu.smoke import smoke
from benchmarks.gpu.steps_profile import profile
from benchmarks.gpu.suite import tests


def machine(run: Run, found: dict[str, Any]) -> None:
    """Device, versions, commit; bandwidths of memory, bus and gather kernel."""
    found |= environment(run.device) | {"dtype": str(run.dtype)}
    run.attempt(found.setdefault("memory", {}), lambda: memory(run, found["memory"]))
    run.attempt(found.setdefault("gather", {}), lambda: gather(run, found["gather"]))


WORK: dict[str, Callable[[Run, dict[str, Any]], None]] = {
    "environment": machine,
    "smoke": smoke,
    "checks": check_kernels,
    "kernels": kernels,
    "profile": profile,
    "latency": latency,
    "model": whole_model,
    "graphs": graphs,
    "batches": batches,
    "tests": tests,
}


def main() -> None:
    """Run the stage that the command line names."""
    name, path, seconds, *flags = sys.argv[1:]
    cuda = torch.cuda.is_available()
    quick = "--quick" in flags
    if not (cuda or quick):
        sys.exit("there is no CUDA device: --quick tries the script without one.")
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    run = Run(device, torch.bfloat16 if cuda else torch.float32, quick, float(seconds), Path(path))
    run.attempt(run.record, lambda: WORK[name](run, run.record))


if __name__ == "__main__":
    main()
