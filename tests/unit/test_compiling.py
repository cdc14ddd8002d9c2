"""What a compile leaves behind in the process: Python's garbage collector and its threads are as they were."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from specache_fx.direct import inductor_start
from specache_fx.runners.base import compiling


@pytest.fixture
def collected() -> Iterator[None]:
    """Begin without garbage, and end with a collector that collects."""
    gc.unfreeze()  # what another test has frozen
    gc.collect()
    yield
    gc.unfreeze()
    gc.enable()


def test_objects_of_a_compile_are_not_read_by_the_next_collection(collected: None) -> None:
    looked = []

    def look(phase: str, info: dict[str, int]) -> None:
        looked.append((phase, info["generation"]))

    gc.collect()
    gc.callbacks.append(look)
    try:
        with compiling():
            made = [[] for _ in range(100_000)]
        count, *_ = gc.get_count()
        assert looked == [] and count < 100 and gc.isenabled() and len(made) == 100_000
    finally:
        gc.callbacks.remove(look)


def test_cycles_of_a_compile_are_collected_later(collected: None) -> None:
    class Node:
        pass

    with compiling():
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        del node
    assert gc.collect() > 0
    assert not any(isinstance(each, Node) for each in gc.get_objects())


def test_objects_that_a_program_has_frozen_stay_so(collected: None) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with compiling():
        made = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= frozen - 100 and len(made) == 1000


def test_a_collector_that_is_off_stays_off(collected: None) -> None:
    gc.disable()
    with compiling(), compiling():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("meanwhile", [None, 0.003])
def test_threads_switch_as_before_or_as_somebody_has_set_it(meanwhile: float | None) -> None:
    before = sys.getswitchinterval()
    try:
        with inductor_start._switching(seconds=1e-4):
            assert sys.getswitchinterval() == pytest.approx(1e-4)
            if meanwhile:
                sys.setswitchinterval(meanwhile)
        assert sys.getswitchinterval() == pytest.approx(meanwhile or before)
    finally:
        sys.setswitchinterval(before)
