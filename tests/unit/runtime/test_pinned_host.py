"""Page-locked host memory, with a fake of CUDA's library: what is registered, when, by whom, for which device."""

from __future__ import annotations

import gc
import mmap
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cudart import FakeRuntime
from support.watch import Watch

from specache_fx._log import forget_warnings
from specache_fx.errors import HostMemoryError
from specache_fx.runtime.host.host_blocks import PinnedStore
from specache_fx.runtime.host.host_cache import HostCache, _send
from specache_fx.runtime.native import cudart


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    fake = FakeRuntime()
    monkeypatch.setattr(cudart, "library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", fake.on)
    yield fake
    gc.collect()  # what is dropped unlocks its pages


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that torch's allocator of page-locked memory was asked for."""
    asked, usual = list[tuple[int, ...]](), torch.empty

    def empty(shape: tuple[int, ...], pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(shape)
        return usual(shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return asked


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch for the CPU brings no CUDA library")
def test_the_library_has_what_is_called():
    assert set(vars(cudart.library())) == set(cudart._SIGNATURES)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has it")
def test_a_torch_without_the_library_says_so():
    with pytest.raises(OSError, match="this torch has no cuda"):
        cudart.library()


def test_pinned_blocks_take_what_was_asked_for_and_give_it_back_at_once(runtime):
    store = PinnedStore(None)
    sizes = [(3, 5, 1000), (1, 9, 4096)]
    blocks = [store.allocate(size, torch.bfloat16) for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        block.fill_(1)
        assert runtime.registered[block.data_ptr()] == 2 * size[0] * size[1] * size[2] == block.nbytes
    assert store.nbytes == sum(runtime.registered.values())
    assert runtime.flags == {3}  # portable, and mapped for kernels
    view = blocks[0][1:]
    del block, blocks
    assert list(runtime.registered) == [view.untyped_storage().data_ptr()]
    del view
    assert not runtime.registered


def test_pinned_memory_that_can_not_be_had_is_named(runtime):
    runtime.error = 2
    store = PinnedStore(None)  # a torch for the CPU has no other either
    with pytest.raises(
        HostMemoryError, match=r"page-locked memory .* cudaHostRegister failed with error 2.*host=\"memory\""
    ):
        store.allocate((4, 4), torch.float32)
    assert store.nbytes == 0 and not runtime.registered and not runtime.last_error


@pytest.mark.parametrize("refusal", ["error", "moved"])
def test_memory_that_is_not_registered_is_torchs_and_no_error_stays(refusal, runtime, torchs, caplog):
    setattr(runtime, refusal, 801)
    forget_warnings()
    store = PinnedStore(None, torch.device("cuda", 1))
    blocks = [store.allocate((4, 4), torch.float32) for _ in range(2)]
    assert torchs == [(4, 4)] * 2 and store.nbytes == 128 and len(blocks) == 2
    assert not runtime.registered and not runtime.last_error
    assert caplog.text.count("can't page-lock memory by itself") == 1
    why = {"error": "cudaHostRegister failed with error 801", "moved": "the device has another address"}
    assert why[refusal] in caplog.text


def test_pages_are_locked_and_unlocked_for_the_sessions_device_in_every_thread(runtime):
    cache = HostCache(
        1, [(1, 8, 8)], torch.float32, "pinned", block_tokens=64, device=torch.device("cuda", 1)
    )
    for _ in range(6):
        cache.append(0, torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8))
    blocks = cache.parts(0)
    assert any(name.startswith("specache-reserve") for name in runtime.threads)
    cache.close()
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    assert not runtime.registered and runtime.devices == {torch.device("cuda", 1)}


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="this system's forks share all")
def test_a_forked_process_gets_no_share_in_locked_pages(runtime):
    block = PinnedStore(None).allocate((1 << 16,), torch.float32).fill_(1)
    flags = re.compile(rf"^{block.data_ptr() & ~4095:x}-.*?^VmFlags: (.*?)$", re.MULTILINE | re.DOTALL)
    found = flags.search(Path("/proc/self/smaps").read_text())
    assert found is not None and "dc" in found[1].split()  # don't copy on fork


def test_decoding_pins_nothing_on_the_thread_of_the_step(runtime):
    cache = HostCache(2, [(2, 8, 8)], torch.bfloat16, "pinned", block_tokens=256)

    def append(tokens: int) -> None:
        cache.append(0, *(torch.randn(2, 2, tokens, 8, dtype=torch.bfloat16) for _ in range(2)))

    append(1024)
    reserved = len(runtime.threads)
    assert set(runtime.threads) == {threading.current_thread().name}
    for _ in range(40):
        append(64)
    later = set(runtime.threads[reserved:])
    assert len(later) == 1 and later.pop().startswith("specache-reserve")
    assert cache.length(0) == 1024 + 40 * 64
    cache.close()
    assert not runtime.registered


def test_ahead_of_a_step_there_may_be_no_memory_and_the_step_asks_again(runtime):
    cache = HostCache(1, [(1, 8, 8)], torch.float32, "pinned", block_tokens=64)
    rows = torch.randn(1, 1, 64, 8)
    cache.append(0, rows, rows)
    runtime.error = 2
    cache.append(0, rows, rows)  # fills what was reserved; the thread gets nothing
    with pytest.raises(HostMemoryError):
        cache.append(0, rows, rows)
    runtime.error = 0
    cache.append(0, rows, rows)
    assert torch.equal(cache.read(0, 128, 192)[0], rows)


def test_rows_from_the_device_go_out_in_one_call_from_piece_to_piece():
    block = torch.zeros(2, 3, 10, 8)
    pairs = torch.randn(2, 3, 7, 8)
    copies: list[Any] = []
    with Watch(lambda func, args, _: "copy" in str(func) and copies.append((str(func), args))):
        _send(block[:, :, 2:6], pairs[:, :, 1:5])
    ((name, (targets, sources, non_blocking)),) = copies
    assert name == "aten._foreach_copy_.default" and non_blocking
    # A copy between devices of what is in one piece on both sides takes no buffer.
    assert len(targets) == 6 and all(each.is_contiguous() for each in (*targets, *sources))
    assert torch.equal(block[:, :, 2:6], pairs[:, :, 1:5])
    assert not block[:, :, :2].any() and not block[:, :, 6:].any()
