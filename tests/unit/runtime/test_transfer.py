"""Transfers: what is staged after any sequence of prefetches, waits and resets; how it fails and ends."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.late_transfer import late_transfer
from support.process import start

from specache_fx.errors import HostMemoryError, SpecacheError
from specache_fx.runtime import tracing
from specache_fx.runtime.host.host_blocks import resolve_host
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.native import cpp_build, graph_ops
from specache_fx.runtime.transfer import CpuTransfer, Staging, choose_transfer, cpu, plan_slots

SHAPES = [(2, 3, 5), (1, 4, 4)]
BATCH = 2
TOP_K = 6
NEEDS_CPP = pytest.mark.skipif(cpp_build.find_compiler() is None, reason="no C++ compiler")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


def make_host(tokens: int, device: str = "cpu", kind: str = "auto") -> tuple[HostCache, list[torch.Tensor]]:
    """A filled host cache, and its rows `[batch, heads, tokens, dim]` by layer."""
    kind = resolve_host(kind, torch.device(device))
    host = HostCache(BATCH, SHAPES, torch.float32, kind, block_tokens=64)
    rows = []
    for layer, (heads, key_dim, value_dim) in enumerate(SHAPES):
        gen = torch.Generator().manual_seed(layer)
        rows.append(torch.randn(BATCH, heads, tokens, key_dim + value_dim, generator=gen))
        for first in range(0, tokens, 50):  # several blocks
            part = rows[layer][:, :, first : first + 50]
            host.append(layer, part[..., :key_dim], part[..., key_dim:])
    return host, rows


def choose(layer: int, tokens: int, seed: int, spread: int) -> torch.Tensor:
    """A selection of up to TOP_K of the first `spread` tokens for each row, so that selections overlap."""
    rng = random.Random(seed)
    rows = []
    for _ in range(BATCH * SHAPES[layer][0]):
        chosen = rng.sample(range(min(spread, tokens)), rng.randint(0, min(TOP_K, spread, tokens)))
        chosen += [-1] * (TOP_K - len(chosen))
        rows.append(chosen if rng.random() < 0.5 else rng.sample(chosen, TOP_K))
    return torch.tensor(rows, dtype=torch.int32).reshape(BATCH, SHAPES[layer][0], TOP_K)


def tokens_of(row: torch.Tensor) -> set[int]:
    return {token for token in row.flatten().tolist() if token >= 0}


def assert_staged(
    rows: torch.Tensor, indices: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor
) -> None:
    """The slots hold the wanted tokens, each once, with the rows that the host has for them."""
    for b in range(indices.shape[0]):
        for h in range(indices.shape[1]):
            held = [token for token in indices[b, h].tolist() if token >= 0]
            assert sorted(held) == sorted(tokens_of(wanted[b, h]))
            for slot, token in enumerate(indices[b, h].tolist()):
                if token >= 0:
                    assert torch.equal(rows[b, h, slot].cpu(), source[b, h, token])


SELECTIONS = st.lists(st.integers(-1, 9), min_size=5, max_size=5).map(
    lambda row: [token if token not in row[:place] else -1 for place, token in enumerate(row)]
)
# What is staged and what is wanted: int32 [2, 3, 5] each.
STAGED_AND_WANTED = st.lists(st.tuples(SELECTIONS, SELECTIONS), min_size=6, max_size=6).map(
    lambda rows: torch.tensor(rows, dtype=torch.int32).transpose(0, 1).contiguous().view(2, 2, 3, 5)
)


@settings(max_examples=150)
@given(both=STAGED_AND_WANTED)
def test_plan_keeps_what_is_wanted_and_fetches_the_rest_into_free_slots(both):
    staged, wanted = both
    plan = plan_slots(staged, wanted)
    after = plan.slots.clone().view(-1)
    expected_kept = 0
    for old, new, now in zip(*(t.view(6, 5).tolist() for t in (staged, wanted, plan.slots)), strict=True):
        kept = (set(old) & set(new)) - {-1}
        expected_kept += len(kept)
        assert all(now[old.index(token)] == token for token in kept)
        assert sorted(token for token in now if token >= 0) == sorted(token for token in new if token >= 0)
    assert plan.num_kept == expected_kept
    assert len(plan.slot_idx) == int((wanted >= 0).sum()) - expected_kept
    assert after[plan.slot_idx].tolist() == plan.token_idx.tolist()
    assert torch.equal(plan.slot_idx // 5, plan.batch_idx * 3 + plan.head_idx)
    assert (staged.view(-1)[plan.slot_idx] != plan.token_idx).all()


@NEEDS_CPP
@settings(max_examples=150)
@given(both=STAGED_AND_WANTED)
def test_cpp_stages_as_planned(both):
    assert graph_ops.load() is not None
    slots, wanted = both
    plan = plan_slots(slots, wanted)
    source = torch.arange(60.0).reshape(2, 3, 10, 1).expand(-1, -1, -1, 3)
    blocks = [source[:, :, :4].contiguous(), source[:, :, 4:9].contiguous(), source[:, :, 9:].contiguous()]
    there = torch.full((2, 3, 5, 3), -1.0)
    expected = there.clone()
    expected.view(-1, 3)[plan.slot_idx] = source[plan.batch_idx, plan.head_idx, plan.token_idx]
    addresses = [block.data_ptr() for block in blocks]
    table = torch.tensor([3, 0, addresses[0], 4, addresses[1], 9, addresses[2], 10])
    done = torch.ops.specache.stage(table, 10, wanted, slots, there)
    assert done == [0, len(plan.slot_idx), plan.num_kept]
    assert torch.equal(slots, plan.slots) and torch.equal(there, expected)


@NEEDS_CPP
def test_cpp_changes_nothing_where_a_token_is_not_there():
    assert graph_ops.load() is not None
    host = HostCache(2, [(1, 1, 2)], torch.float32)
    host.append(0, torch.ones(2, 1, 4, 1), torch.ones(2, 1, 4, 2))
    staging = Staging.empty((2, 1, 2), 3, torch.float32, torch.device("cpu"))
    staging.slots.copy_(torch.tensor([[[0, 1]], [[2, -1]]]))
    before = staging.slots.clone()
    staging.wanted[1, 0, 1] = 4
    with pytest.raises(IndexError, match="Token 4 of layer 0, which holds 4"):
        cpu.bring(host, 0, staging)
    assert torch.equal(staging.slots, before) and not staging.rows.any()


@NEEDS_CPP
def test_cpp_refuses_what_are_no_slots():
    assert graph_ops.load() is not None
    table, rows = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, 2, 3)
    slots = torch.zeros(1, 1, 2, dtype=torch.int32)
    for wrong in ((slots.long(), slots, rows), (slots, slots[..., :1], rows), (slots, slots, rows[..., ::2])):
        with pytest.raises(RuntimeError, match="these are no slots"):
            torch.ops.specache.stage(table, 0, *wrong)


class WorkerMachine(RuleBasedStateMachine):
    """Prefetches, waits, resets and appends in any order; random delays on the worker."""

    device = "cpu"
    host_kind = "auto"
    synchronous = False
    late = True  # else it is what is chosen for the host
    layers = st.integers(0, len(SHAPES) - 1)

    @initialize(seed=st.integers(0, 99))
    def open(self, seed):
        rng = random.Random(seed)
        self.host, self.rows = make_host(150, self.device, self.host_kind)
        self.transfer = self.make_transfer(rng)
        self.wanted = [torch.full((BATCH, heads, TOP_K), -1, dtype=torch.int32) for heads, _, _ in SHAPES]
        self.fetched = self.reused = self.fetched_bytes = self.reused_bytes = 0

    def make_transfer(self, rng):
        given = self.host, TOP_K, torch.device(self.device)
        if not self.late:
            return choose_transfer(*given)
        transfer = late_transfer(*given, lambda: time.sleep(rng.choice([0, 0, 1e-4, 1e-3])))
        transfer.synchronous = self.synchronous
        return transfer

    @rule(layer=layers, seed=st.integers(0, 999), spread=st.sampled_from([4, 8, 1000]))
    def prefetch(self, layer, seed, spread):
        wanted = choose(layer, self.rows[layer].shape[2], seed, spread)
        for old, new in zip(self.wanted[layer].view(-1, TOP_K), wanted.view(-1, TOP_K), strict=True):
            missing = tokens_of(new) - tokens_of(old)
            self.fetched += len(missing)
            self.fetched_bytes += len(missing) * self.rows[layer].shape[3] * 4
            there = len(tokens_of(new) & tokens_of(old))
            self.reused += there
            self.reused_bytes += there * self.rows[layer].shape[3] * 4
        self.wanted[layer] = wanted
        given_away = wanted.to(self.device, copy=True)
        self.transfer.prefetch(layer, given_away)
        given_away.fill_(3)  # a compiled graph reuses its buffers at once

    @rule(layer=layers)
    def wait(self, layer):
        rows, indices = self.transfer.wait(layer)
        assert_staged(rows, indices, self.wanted[layer], self.rows[layer])

    @rule(layer=layers)
    def reset(self, layer):
        self.transfer.reset(layer)
        self.wanted[layer] = torch.full_like(self.wanted[layer], -1)

    @rule(layer=layers, seed=st.integers(0, 9))
    def append(self, layer, seed):
        """The host may grow while a copy is under way."""
        _, key_dim, _ = SHAPES[layer]
        shape = list(self.rows[layer].shape)
        shape[2] = 40
        new = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.host.append(layer, new[..., :key_dim], new[..., key_dim:])
        self.rows[layer] = torch.cat([self.rows[layer], new], dim=2)

    @rule(layer=layers)
    def crop(self, layer):
        """A crop forgets tokens, and others take their places."""
        self.reset(layer)
        keep = self.rows[layer].shape[2] // 2
        self.host.truncate(layer, keep)
        self.rows[layer] = self.rows[layer][:, :, :keep]

    def teardown(self):
        if not hasattr(self, "transfer"):
            return
        for layer in range(len(SHAPES)):
            self.wait(layer)
        metrics = self.transfer.metrics
        assert (metrics.fetched_rows, metrics.reused_rows) == (self.fetched, self.reused)
        assert (metrics.fetched_bytes, metrics.reused_bytes) == (self.fetched_bytes, self.reused_bytes)
        self.transfer.close()
        self.transfer.close()
        self.host.close()


class SynchronousMachine(WorkerMachine):
    synchronous = True


class PlainMachine(WorkerMachine):
    """A thread, where C++ can't be built."""

    @initialize(seed=st.integers(0, 99))
    def open(self, seed):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cpu.graph_ops, "load", lambda: None)
        super().open(seed)

    def teardown(self):
        try:
            super().teardown()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()


class PlainInMemoryMachine(PlainMachine):
    """At once, where C++ can't be built."""

    late = False


class InMemoryMachine(WorkerMachine):
    """Rows are in memory: they are copied at once."""

    late = False


class FileMachine(WorkerMachine):
    """Rows are in files: a thread copies them."""

    late, host_kind = False, "disk"


class CudaMachine(WorkerMachine):
    """Page-locked rows: the device copies by itself."""

    late, device = False, "cuda"


class CudaWorkerMachine(WorkerMachine):
    """Rows that a GPU can't read: a thread sends them."""

    device, host_kind = "cuda", "memory"


def case(machine, needs=lambda test: test):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
    return needs(machine.TestCase)


TestAsynchronous = case(WorkerMachine)
TestSynchronous = case(SynchronousMachine)
TestPlain = case(PlainMachine)
TestPlainInMemory = case(PlainInMemoryMachine)
TestInMemory = case(InMemoryMachine, NEEDS_CPP)
TestFile = case(FileMachine, NEEDS_CPP)
TestCuda = case(CudaMachine, NEEDS_CUDA)
TestCudaWorker = case(CudaWorkerMachine, NEEDS_CUDA)


def run_alone(code: str) -> str:
    """What a program prints that runs in a process of its own, ends well and complains of nothing."""
    process = start(code, PYTHONWARNINGS="ignore")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return out


def wanted_of(*tokens: int, layer: int = 0) -> torch.Tensor:
    row = list(tokens) + [-1] * (TOP_K - len(tokens))
    return torch.tensor(row, dtype=torch.int32).expand(BATCH, SHAPES[layer][0], TOP_K).contiguous()


def test_prefetch_returns_at_once_and_wait_and_reset_do_not():
    host, source = make_host(10)
    go = threading.Event()
    transfer = late_transfer(host, TOP_K, torch.device("cpu"), lambda: go.wait() and None)
    for method in (transfer.wait, transfer.reset):
        go.clear()
        transfer.prefetch(0, wanted_of(1, 2))
        waiter = threading.Thread(target=method, args=(0,))
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()
        go.set()
        waiter.join(10)
        assert not waiter.is_alive()
    assert (transfer.wait(0)[1] == -1).all()
    transfer.prefetch(0, wanted_of(4))
    assert_staged(*transfer.wait(0), wanted_of(4), source[0])
    transfer.close()


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_error_of_a_copy_is_raised_by_the_next_wait_once(device, synchronous):
    host, source = make_host(10, device)
    # The thread's way: where the device copies, indices never visit the CPU (`test_triton_gather.py`).
    transfer = late_transfer(host, TOP_K, torch.device(device))
    transfer.synchronous = synchronous
    transfer.prefetch(0, wanted_of(1, 2).to(device))
    transfer.prefetch(0, wanted_of(1, 10).to(device))  # the host has ten tokens, 0 to 9
    transfer.prefetch(1, wanted_of(3, layer=1).to(device))
    assert_staged(*transfer.wait(1), wanted_of(3, layer=1), source[1])
    with pytest.raises(IndexError, match="Token 10 of layer 0, which holds 10"):
        transfer.wait(0)
    assert (transfer.wait(0)[1] == -1).all()
    transfer.prefetch(0, wanted_of(5).to(device))
    assert_staged(*transfer.wait(0), wanted_of(5), source[0])
    for surface in (lambda: transfer.prefetch(0, wanted_of(1).to(device)), lambda: transfer.reset(0)):
        transfer.prefetch(0, wanted_of(11).to(device))
        with pytest.raises(IndexError, match="Token 11"):
            surface()
    transfer.prefetch(0, wanted_of(12).to(device))
    transfer.close()
    with pytest.raises(SpecacheError, match="closed"):
        transfer.prefetch(0, wanted_of(1).to(device))


def test_error_of_a_copy_that_is_made_at_once_is_raised_at_once():
    host, source = make_host(10, "cpu")
    transfer = choose_transfer(host, TOP_K, torch.device("cpu"))
    assert isinstance(transfer, CpuTransfer)
    transfer.prefetch(0, wanted_of(1, 2))
    with pytest.raises(IndexError, match="Token 10 of layer 0, which holds 10"):
        transfer.prefetch(0, wanted_of(1, 10))
    assert_staged(*transfer.wait(0), wanted_of(1, 2), source[0])  # as they were
    transfer.prefetch(0, wanted_of(5))
    assert_staged(*transfer.wait(0), wanted_of(5), source[0])
    transfer.close()
    with pytest.raises(SpecacheError, match="closed"):
        transfer.prefetch(0, wanted_of(1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_process_copies_with_a_transfer_of_its_own():
    code = """
        import os, torch
        from specache_fx.runtime.host.host_cache import HostCache
        from specache_fx.runtime.transfer import choose_transfer

        torch.set_num_threads(1)  # OpenMP's don't survive a fork

        def transfer_of(tokens, dim, top_k):
            host = HostCache(1, [(1, dim, dim)], torch.float32, "disk")
            host.append(0, *(torch.arange(tokens).float().view(1, 1, -1, 1).expand(1, 1, tokens, dim),) * 2)
            return choose_transfer(host, top_k, torch.device("cpu"))

        def copy(transfer, first, tokens):
            transfer.prefetch(0, torch.arange(first, first + tokens, dtype=torch.int32).view(1, 1, -1))

        def check(transfer, first, tokens):
            rows, indices = transfer.wait(0)
            assert indices.sort().values.flatten().tolist() == list(range(first, first + tokens))
            assert torch.equal(rows[0, 0, :, -1], indices[0, 0].float())

        def use(transfer):
            for first in range(50):
                copy(transfer, first, 64)
                check(transfer, first, 64)

        ours, large = transfer_of(5000, 64, 64), transfer_of(4096, 2048, 4096)
        use(ours)
        copy(large, 0, 4096)  # 64 MiB: milliseconds
        child = os.fork()
        if not child:
            use(transfer_of(5000, 64, 64))
            raise SystemExit
        check(large, 0, 4096)
        use(ours)
        assert os.waitpid(child, 0)[1] == 0
    """
    run_alone(code)


@NEEDS_CPP
def test_rows_in_memory_are_copied_at_once():
    host, source = make_host(10)
    transfer = choose_transfer(host, TOP_K, torch.device("cpu"))
    before = set(threading.enumerate())
    with tracing.recording() as recorder:
        for layer in range(len(SHAPES)):
            transfer.prefetch(layer, wanted_of(1, 2, layer=layer))
            held = transfer.staging(layer)  # nobody waits
            assert_staged(held.rows, held.indices, wanted_of(1, 2, layer=layer), source[layer])
    assert set(threading.enumerate()) == before
    metrics = transfer.metrics
    assert metrics.copy_seconds == metrics.waited_seconds > 0  # nothing is computed meanwhile
    spans = recorder.finish()
    assert [(span.name, span.track, span.args["layer"]) for span in spans] == [
        ("prefetch", "copies", layer) for layer in range(len(SHAPES))
    ]
    transfer.close()


@NEEDS_CPP
def test_copies_find_rows_in_blocks_that_came_later():
    host, source = make_host(10)
    transfer = choose_transfer(host, TOP_K, torch.device("cpu"))
    for tokens in (10, 110, 210):
        last = wanted_of(2, tokens - 1)
        transfer.prefetch(0, last)
        assert_staged(*transfer.wait(0), last, source[0])
        heads, key_dim, value_dim = SHAPES[0]
        new = torch.randn(BATCH, heads, 100, key_dim + value_dim)
        host.append(0, new[..., :key_dim], new[..., key_dim:])
        source[0] = torch.cat([source[0], new], dim=2)
    transfer.close()


def test_wait_that_is_interrupted_leaves_the_copy():
    host, source = make_host(10)
    go = threading.Event()
    transfer = late_transfer(host, TOP_K, torch.device("cpu"), lambda: go.wait() and None)
    transfer.prefetch(0, wanted_of(1, 2))

    def interrupt(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError):
            transfer.wait(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    go.set()
    assert_staged(*transfer.wait(0), wanted_of(1, 2), source[0])
    assert transfer.metrics.fetched_rows == 2 * BATCH * SHAPES[0][0]
    transfer.close()


@NEEDS_CPP
def test_rows_in_a_file_are_copied_by_a_thread(tmp_path):
    host = HostCache(BATCH, SHAPES, torch.float32, "disk", str(tmp_path))
    for layer, (heads, key_dim, value_dim) in enumerate(SHAPES):
        host.append(layer, torch.ones(BATCH, heads, 8, key_dim), torch.ones(BATCH, heads, 8, value_dim))
    transfer = choose_transfer(host, TOP_K, torch.device("cpu"))
    before = set(threading.enumerate())
    transfer.prefetch(0, wanted_of(1))
    assert len(set(threading.enumerate()) - before) == 1
    assert (transfer.wait(0)[0][:, :, 0] == 1).all()
    transfer.close()
    host.close()


def test_rows_are_written_and_read_across_inference_mode():
    host, source = make_host(10)
    with torch.inference_mode():
        transfer = choose_transfer(host, TOP_K, torch.device("cpu"))
        transfer.prefetch(0, wanted_of(1, 2))
        transfer.wait(0)
    transfer.prefetch(0, wanted_of(2, 3))
    rows, indices = transfer.wait(0)
    assert not rows.is_inference()
    assert_staged(rows, indices, wanted_of(2, 3), source[0])
    transfer.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_thread_ends_with_its_transfer(end):
    host, _ = make_host(10)
    before = set(threading.enumerate())
    transfer = late_transfer(host, TOP_K, torch.device("cpu"), lambda: time.sleep(0.01))
    transfer.prefetch(0, wanted_of(1))
    (worker,) = set(threading.enumerate()) - before
    if end == "close":
        transfer.close()
    del transfer
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()


def test_interpreter_exits_with_a_copy_under_way():
    code = """
        import atexit, threading
        atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # runs last
        import time, torch
        from specache_fx.runtime.host.host_cache import HostCache
        from support.late_transfer import late_transfer

        host = HostCache(1, [(1, 64, 64)], torch.float32)
        host.append(0, torch.zeros(1, 1, 5000, 64), torch.zeros(1, 1, 5000, 64))
        transfer = late_transfer(host, 4096, torch.device("cpu"), lambda: time.sleep(0.05))
        transfer.prefetch(0, torch.arange(4096, dtype=torch.int32).view(1, 1, -1))
    """
    assert run_alone(code) == "['MainThread']\n"


def test_slots_that_no_memory_has_room_for_name_their_option():
    host, _ = make_host(10)
    with pytest.raises(HostMemoryError, match=r"no memory for top_k=35184372088832 .* lower top_k"):
        choose_transfer(host, 2**45, torch.device("cpu")).staging(0)


def test_a_daemon_threads_copies_at_the_interpreters_exit_are_made_without_a_thread():
    """`atexit` functions run behind the end of all thread pools."""
    code = """
        import atexit, torch
        from specache_fx.runtime.host.host_cache import HostCache
        from specache_fx.runtime.transfer import choose_transfer

        host = HostCache(1, [(1, 8, 8)], torch.float32, "disk")
        host.append(0, *(torch.arange(9.0).view(1, 1, 9, 1).expand(1, 1, 9, 8),) * 2)
        transfer = choose_transfer(host, 4, torch.device("cpu"))

        @atexit.register
        def copies():
            transfer.prefetch(0, torch.arange(4, dtype=torch.int32).view(1, 1, -1))
            print(transfer.wait(0)[0][0, 0, :, 0].tolist())
    """
    assert run_alone(code) == "[0.0, 1.0, 2.0, 3.0]\n"
