"""Page-locked host memory, with a fake of CUDA's runtime: what is registered, when, and by which thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.watch import Watch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.host_blocks import PinnedStore
from specache_fx.runtime.host_cache import HostCache, _send


class FakeRuntime:
    """Registers memory in a dict; fails where it is told to."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}
        self.flags: set[int] = set()
        self.threads: list[str] = []  # that registered

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = nbytes
            self.flags.add(flags)
            self.threads.append(threading.current_thread().name)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


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
    store = PinnedStore(None)
    with pytest.raises(
        HostMemoryError, match=r"page-locked memory .* cudaHostRegister failed with error 2.*host=\"memory\""
    ):
        store.allocate((4, 4), torch.float32)
    assert store.nbytes == 0 and not runtime.registered


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
