"""Programs in a process of their own, which finds this package, `support` and the tests of models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "models")))


def python(*arguments: str) -> str:
    """What Python prints, one thread."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
