"""Calls that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls that begin together, a new thread each. Raises what the first of them raised."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        begin.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
