"""Spins of OpenMP's threads follow what this process waits for cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from specache_fx.runtime.native import graph_ops, openmp_spins


def test_spins_follow_the_share_of_waiting() -> None:
    watch, ran, waited = openmp_spins._Watch(), 5.0, 5.0
    answers = []
    for more, share in (
        *((0.0, 0.0), (1.0, 0.02), (1.0, 0.1), (1.0, 0.2)),
        *((1.0, 0.1), (1.0, 0.05), (1.0, 0.1), (0.01, 0.9), (1.0, 0.01)),
    ):
        ran, waited = ran + more * (1 - share), waited + more * share
        watch.is_short = watch.look((ran, waited))
        answers.append(watch.is_short)
    # Nothing is known, idle, between, busy; between, idle, between, too little to tell, idle.
    assert answers == [False, False, False, True, True, False, False, False, False]


def test_what_can_not_be_told_changes_nothing() -> None:
    for is_short in (True, False):
        watch = openmp_spins._Watch()
        watch.is_short = is_short
        for seen in ((9.0, 1.0), None, (9.0, 50.0), (3.0, 50.0), (3.0, 2.0)):
            assert watch.look(seen) is is_short


def test_spins_change_back_and_forth() -> None:
    library = graph_ops.load()
    assert library is not None
    x, before = torch.randn(2000, 500), threading.active_count()
    expected, tasks = x.sum(), len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
    for wanted in 20 * [True, True, False]:
        library.specache_short_spins(wanted)
        torch.testing.assert_close(x.sum(), expected)
    assert threading.active_count() == before
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/task")) <= tasks + torch.get_num_threads()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux's schedstat")
def test_other_processes_shorten_spins() -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        watch, until = openmp_spins._Watch(), time.monotonic() + 60
        while not watch.is_short and time.monotonic() < until:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                pass
            watch.is_short = watch.look(openmp_spins._ran_and_waited())
        assert watch.is_short
    finally:
        for each in others:
            each.kill()
            each.wait()
