"""How long OpenMP's threads spin: as long as they are set to, but beside processes that want the cores.

Threads of GNU's OpenMP, which torch's wheels bring, spin for milliseconds behind each parallel region. On idle cores
that is fast: a prompt of 260 tokens takes 0.21 s, and 0.31 s if they sleep. Beside a busy process a thread spins for
one that has no core: the prompt takes 2 s, and 0.33 s if they sleep. So prompts and decode steps begin with a look at
how long this process has waited for cores. Linux knows; elsewhere the spins stay as they are.
"""

from __future__ import annotations

import os
import time

from specache_fx.runtime.native import graph_ops

_SECONDS = 0.25  # between two looks
# Waiting as a share of waiting and running. Idle: 0.005 with short spins, 0.05 with long ones. Beside a process: 0.2.
_MANY, _FEW = 0.15, 0.08
_LEAST = 0.05  # seconds of running that tell


class _Watch:
    """What was last seen.

    Attributes:
        due: When to look again.
        is_short: Whether spins are short now.
    """

    def __init__(self) -> None:
        self.due, self.is_short = 0.0, False
        self._before: tuple[float, float] | None = None

    def look(self, now: tuple[float, float] | None) -> bool:
        """Whether spins are to be short, by seconds of running and of waiting so far."""
        before, self._before = self._before, now
        if now is None or before is None:
            return self.is_short
        ran, waited = (new - old for new, old in zip(now, before, strict=True))
        if min(ran, waited) < 0:  # a thread has ended, and its seconds are gone
            return self.is_short
        if ran + waited < _LEAST:
            self._before = before
            return self.is_short
        share = waited / (ran + waited)
        return share > (_FEW if self.is_short else _MANY)


_watch = _Watch()


def look() -> None:
    """Set the spins by what this process has waited since it was last looked at; cheap in most calls."""
    moment = time.monotonic()
    if moment < _watch.due:
        return
    _watch.due = moment + _SECONDS
    if (wanted := _watch.look(_ran_and_waited())) != _watch.is_short:
        _watch.is_short = wanted
        if (library := graph_ops.load()) is not None:
            library.specache_short_spins(wanted)


def _ran_and_waited() -> tuple[float, float] | None:
    """Seconds that the threads of this process have run, and have waited for a core; None where nothing tells."""
    ran = waited = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                running, waiting, _ = map(int, file.read().split())
            ran, waited = ran + running, waited + waiting
    except (OSError, ValueError):  # a thread has ended
        return None
    return ran / 1e9, waited / 1e9
