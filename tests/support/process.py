"""Programs in a process of their own, which finds this package, `support` and the tests of models."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "models")))


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Python with a program, which leads a group of processes; what it prints is piped."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": PATH, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    """What Python prints, one thread; it has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
