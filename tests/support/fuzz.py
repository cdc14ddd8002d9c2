"""`python -m support.fuzz MINUTES WORKERS`: the state machine with one seed after another, until one run fails.

The first seed is random. A seed gives two settings, and seeds in turn meet all kinds of models.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import SystemRandom

COMMAND = (sys.executable, "-m", "pytest", "-q", "-m", "", "tests/models/test_any_use.py")


def run_until(end: float, seeds: Iterator[int]) -> int:
    """Runs of one process after another; the seed that failed, or 0."""
    while time.monotonic() < end:
        seed = next(seeds)
        run = subprocess.run(
            COMMAND,
            env={**os.environ, "FUZZ_SEED": str(seed), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"FUZZ_SEED={seed}", *run.stdout.splitlines()[-1:], flush=True)  # noqa: T201
        if run.returncode:
            print(run.stdout, f"To run it again: FUZZ_SEED={seed}", *COMMAND[1:], flush=True)  # noqa: T201
            return seed
    return 0


def main(minutes: float, workers: int) -> int:
    end = time.monotonic() + 60 * minutes
    seeds = count(SystemRandom().randrange(1, 10**6))
    with ThreadPoolExecutor(workers) as pool:
        return int(any(list(pool.map(run_until, [end] * workers, [seeds] * workers))))


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]), int(sys.argv[2])))
