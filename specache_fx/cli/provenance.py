"""The origin of numbers: machine, versions, commit and command, for every JSON that is written."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("specache-fx", "torch", "transformers", "datasets", "hqq", "optimum-quanto", "triton")


def provenance(device: torch.device, program: str = "specache-fx") -> dict[str, Any]:
    """Command, device, versions and commit.

    Args:
        device: Where it was measured.
        program: The command line's name.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return {
        "command": shlex.join([program, *sys.argv[1:]]),
        "device": _describe(device),
        "versions": found,
        "commit": _git_commit(),
    }


def _describe(device: torch.device) -> dict[str, Any]:
    """Name, and a CPU's instruction sets."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    names: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "type": device.type,
        "name": names[0] if names else platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _git_commit() -> str | None:
    """The commit that this package is run from, "-dirty" if it was changed since; None outside of its repository."""
    here = Path(__file__)

    def git(*args: str) -> str:
        line = ["git", "-C", str(here.parent), *args]
        # Without optional locks: reading the state must not get in the way of a commit that is being made.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(
            line, capture_output=True, text=True, check=True, env=environment
        ).stdout.strip()

    try:
        # An installed copy may lie in somebody else's repository.
        git("ls-files", "--error-unmatch", here.name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
