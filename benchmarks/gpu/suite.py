"""The tests that a GPU runs on itself: `pytest -m gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import Run

_ROOT = Path(__file__).resolve().parents[2]


def tests(run: Run, found: dict[str, Any]) -> None:
    """The last lines, and whether all passed. To try the script it is enough to collect them."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    found["command"] = " ".join(command[1:])
    process = subprocess.Popen(
        [*command, *(["--collect-only"] if run.quick else [])],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=max(run.left() - 2, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        found["error"] = "there was no time for all of them"
    found |= {"ok": process.returncode == 0, "output": said.splitlines()[-60:]}
