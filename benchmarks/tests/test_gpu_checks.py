"""The GPU script's checks of captures, streams and page-locked memory, on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fake_cudart import FakeRuntime
from support.streams_sim import World, simulated
from support.triton_mode import DEVICE, needs_triton

from specache_bench import gpu_checks
from specache_fx.runtime.host import host_blocks
from specache_fx.runtime.native import cuda_streams, cudart
from specache_fx.runtime.steps.step_graph import NotCapturedError

pytestmark = [needs_triton, pytest.mark.skipif(DEVICE.type != "cpu", reason="there the script itself runs")]
CPU = torch.device("cpu")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    fake = FakeRuntime()
    monkeypatch.setattr(cudart, "library", lambda: fake)
    with simulated(monkeypatch) as made:
        monkeypatch.setattr(fake, "called", lambda: fake.devices.add(made.device))
        yield made


@pytest.mark.parametrize(
    "check",
    [
        gpu_checks.captures_in_a_row,
        gpu_checks.failed_captures,
        gpu_checks.threads,
        gpu_checks.refused_memory,
        gpu_checks.forked_memory,
    ],
)
def test_a_check_passes_where_all_is_right(
    check: Callable[[torch.device], dict[str, Any]], world: World
) -> None:
    found = check(CPU)
    assert found["ok"] is True, found
    assert not world.recording


def failed(check: Callable[[torch.device], dict[str, Any]]) -> bool:
    """Whether a check says so, or ends by an error, which the script records."""
    try:
        return check(CPU)["ok"] is False
    except (AssertionError, RuntimeError, NotCapturedError):
        return True


def test_checks_find_what_is_wrong(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cuda_streams, "synchronize", torch.cuda.synchronize)
        assert failed(gpu_checks.threads)
    with monkeypatch.context() as patch:
        patch.setattr(cudart.library(), "cudaGetLastError", lambda: cudart.library().last_error)
        assert failed(gpu_checks.refused_memory)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_streams, "_abandon", lambda *_: None)
        assert failed(gpu_checks.failed_captures)


def test_the_second_device_is_captured_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch.ones

    def ones(*size: int, device: object = None) -> torch.Tensor:
        return usual(size)

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(host_blocks, "available_bytes", lambda: 1 << 40)
    found = gpu_checks.second_device(CPU)
    assert found["devices"] == 2 and found["ok"] is True and found["cuda:1: rows"]
    assert cudart.library().devices == {1}
