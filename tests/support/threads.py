"""Calls that run at the same time, and the number of threads of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls that begin together, a new thread each. Raises what the first of them raised."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        begin.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """PyTorch computes by so many threads, then by as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
