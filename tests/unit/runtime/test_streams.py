"""The GPU's streams, by simulation: no transfer races, and each planted mistake is found (`support/streams_sim.py`)."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.streamed_decoder import USUAL, Decoder, choose
from support.streams_sim import CUDA, Event, Stream, World, simulated
from support.triton_mode import DEVICE, needs_triton
from support.zoo import build

import specache_fx
from specache_fx._log import forget_warnings
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.native import cuda_streams, cudart
from specache_fx.runtime.session.metrics import Metrics
from specache_fx.runtime.steps.device_steps import DeviceSteps
from specache_fx.runtime.steps.step_graph import CudaRecorder
from specache_fx.runtime.transfer import CudaTransfer, CudaWorkerTransfer, Staging, cuda_worker

pytestmark = [needs_triton, pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter runs on a CPU")]

TWO_LANES: dict[str, Any] = {"lanes": 2, "lookahead": "token"}
REFERENCE: dict[str, Any] = {"kernel": "reference"}
FORMS: dict[str, dict[str, Any]] = {
    "token": TWO_LANES,
    "query": {"lookahead": "query", "quantizer": "kivi"},
    "none": {"lookahead": "none"},
    "kcache": {"policy": "kcache", "lookahead": "none", **REFERENCE},
    "codes alone": {"policy": "kivi"},
    "no rates": TWO_LANES | {"track_hit_rates": False},
    "windows": TWO_LANES | {"windows": True},
    "sinks": TWO_LANES | {"sink_tokens": 2},
    "exact": TWO_LANES | {"bits": 16} | REFERENCE,
    "corrected": TWO_LANES | {"key_share": 0.03, "value_share": 0.0},
    "padding": TWO_LANES | {"padding": 3},
    "misses": TWO_LANES | {"misses": True},
    "next pairs": TWO_LANES | {"writes": True},
    "an arena that grows": TWO_LANES | {"reserve": 0},
}
# All at night: the interpreter takes a quarter of a second a step.
DAILY = ("token", "exact", "kcache")
EACH = [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in FORMS]


def stepped(world: World, form: dict[str, Any], steps: int = 9) -> Decoder:
    """A decoder behind some steps: two groups fill."""
    decoder = Decoder(world, **form)
    for _ in range(steps):
        decoder.step()
    return decoder


def kinds(world: World) -> set[str]:
    """Of the mistakes that were found."""
    return {each.split(":")[0] for each in world.found}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    choose(monkeypatch, CudaTransfer)
    with simulated(monkeypatch) as made:
        yield made
    assert made.capture is None and not made.recording


@pytest.mark.parametrize("form", EACH)
def test_copies_of_the_device_race_with_nothing_captured_or_not(form: str, world: World) -> None:
    ran = stepped(world, {**FORMS[form], "replay": False})
    assert not world.replays and not world.found
    replayed = stepped(world, FORMS[form])
    assert world.replays >= 3 and not world.found
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(ran.outputs, replayed.outputs, strict=True))
    ran.session.close()
    del ran, replayed  # one is closed, the other dropped
    world.finish()
    assert not world.found and not +world.pools  # no pool is left


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{"on_miss": "refetch"}, {"accept_guesses": True}, {"policy": "kcache", "kernel": "reference"}],
    ids=lambda options: next(iter(options)),
)
def test_steps_of_a_compiled_model_race_with_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, CudaTransfer)
    torch._dynamo.reset()
    model = build("plain", 2, vocab_size=40, hidden_size=32, head_dim=8)
    given: dict[str, Any] = {"lowering": "eager", "lookahead": "token", **USUAL, **options}
    if "policy" in options:
        given.pop("lookahead")
    ids = torch.randint(1, 40, (1, 21), generator=torch.Generator().manual_seed(1))
    with simulated(monkeypatch, steps_alone=True) as world, torch.no_grad():
        compiled = specache_fx.compile(model, **given)
        out = compiled(ids, use_cache=True)
        for _ in range(9):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = compiled(token, past_key_values=out.past_key_values, use_cache=True)
        assert specache_fx.stats(out.past_key_values).replayed_steps >= 3
        specache_fx.release(out.past_key_values)
        assert world.replays >= 3 and not world.found


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("kind", [CudaTransfer, CudaWorkerTransfer])
@pytest.mark.parametrize("host", ["memory", "disk"])
def test_edits_between_steps_race_with_nothing(
    kind: Any, host: str, synchronous: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, kind, synchronous)
    decoder = stepped(world, {"lookahead": "query", "host": host, "kernel": "reference"}, 3)
    session = decoder.session
    session.rewind(session.kv_len - 1)
    decoder.step()
    decoder.prompt(5)
    decoder.step()
    session.reorder([0])
    decoder.step()
    assert not world.found
    if kind is CudaWorkerTransfer:
        assert session.graph is None or not session.graph.replays
    del decoder, session  # dropped, not closed
    world.finish()
    assert not world.found


# Planted mistakes -----------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def without(where: Any, name: str) -> Plant:
    """A method that does nothing."""
    return lambda patch: patch.setattr(where, name, lambda *_, **__: None)


def beside_without_a_wait(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def beside(self: CudaTransfer, layer: int) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    patch.setattr(CudaTransfer, "beside", beside)


def prefetch_of_the_callers_buffer(patch: pytest.MonkeyPatch) -> None:
    def prefetch(self: CudaTransfer, layer: int, indices: torch.Tensor) -> None:
        self._wait(layer)
        self.staging(layer).wanted = indices
        self.prefetch_wanted(layer)
        indices.fill_(-1)  # a compiled graph reuses it

    patch.setattr(CudaTransfer, "prefetch", prefetch)


def counts_without_a_wait(patch: pytest.MonkeyPatch) -> None:
    usual = Metrics.count_topk

    def count(self: Metrics, *given: Any) -> None:
        with patch.context() as inner:
            inner.setattr(Stream, "wait_stream", lambda *_: None)
            usual(self, *given)

    patch.setattr(Metrics, "count_topk", count)


def thread_without_a_wait(patch: pytest.MonkeyPatch) -> None:
    usual = cuda_worker._send

    def send(host: Any, layer: int, staging: Any, stream: Any, selected: Event) -> Any:
        return usual(host, layer, staging, stream, torch.cuda.Event())

    patch.setattr(cuda_worker, "_send", send)


def thread_without_an_event(patch: pytest.MonkeyPatch) -> None:
    usual = cuda_worker._send

    def send(host: Any, layer: int, staging: Staging, *given: Any) -> Any:
        counted = usual(host, layer, staging, *given)
        staging.done = None
        return counted

    patch.setattr(cuda_worker, "_send", send)


def thread_that_nobody_waits_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaWorkerTransfer, "_wait", lambda self, layer: self.staging(layer).order())


LAUNCHED = {**TWO_LANES, "replay": False, "track_hit_rates": False}
BY_OPERATORS = {"lookahead": "query", "replay": False, **REFERENCE}
UNRECORDED = without(torch.Tensor, "record_stream")
PLANTED: dict[str, tuple[Plant, Any, dict[str, Any], str]] = {
    "the copy does not wait": (beside_without_a_wait, CudaTransfer, LAUNCHED, "race"),
    "the next step does not wait": (without(CudaTransfer, "join"), CudaTransfer, LAUNCHED, "race"),
    "no event behind the copy": (without(Event, "record"), CudaTransfer, BY_OPERATORS, "race"),
    "nobody waits for the event": (without(Staging, "order"), CudaTransfer, BY_OPERATORS, "race"),
    "the caller's indices are read": (prefetch_of_the_callers_buffer, CudaTransfer, BY_OPERATORS, "race"),
    "hit rates do not wait": (counts_without_a_wait, CudaTransfer, BY_OPERATORS, "race"),
    "who reads hit rates does not wait": (without(Metrics, "_join"), CudaTransfer, BY_OPERATORS, "race"),
    "scores that are counted go": (UNRECORDED, CudaTransfer, BY_OPERATORS, "lifetime"),
    "slots and pages go": (without(cuda_streams, "synchronize"), CudaTransfer, LAUNCHED, "lifetime"),
    "the thread does not wait": (thread_without_a_wait, CudaWorkerTransfer, BY_OPERATORS, "race"),
    "no event behind the thread's": (thread_without_an_event, CudaWorkerTransfer, BY_OPERATORS, "race"),
    "nobody waits for the thread": (thread_that_nobody_waits_for, CudaWorkerTransfer, BY_OPERATORS, "race"),
    "the thread's slots go": (UNRECORDED, CudaWorkerTransfer, BY_OPERATORS, "lifetime"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_mistake_is_found(planted: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind, form, found = PLANTED[planted]
    choose(monkeypatch, kind)
    plant(monkeypatch)
    decoder = stepped(world, form, 5)  # a group fills
    if planted.startswith("who reads"):
        _ = decoder.session.metrics.hits
    del decoder
    world.finish()
    assert kinds(world) == {found}


@pytest.mark.parametrize("waits", [True, False])
def test_rows_are_read_when_they_have_come(
    waits: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        monkeypatch.setattr(HostCache, "_drain", lambda self: None)
    host = HostCache(1, [(1, 4, 4)], torch.float32)
    host.append(0, torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4))
    host.gather_rows(0, *(torch.zeros(1, dtype=torch.int64) for _ in range(3)))
    assert kinds(world) == (set() if waits else {"race"})


def waits_in_vain(patch: pytest.MonkeyPatch) -> None:
    def join(self: CudaTransfer) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    patch.setattr(CudaTransfer, "join", join)


def waits_for_the_device(patch: pytest.MonkeyPatch) -> None:
    usual = DeviceSteps.launch

    def launch(self: DeviceSteps, *given: Any) -> torch.Tensor:
        out = usual(self, *given)
        if torch.cuda.is_current_stream_capturing():
            cuda_streams.synchronize(self.device)
        return out

    patch.setattr(DeviceSteps, "launch", launch)


def fails_by_itself(patch: pytest.MonkeyPatch) -> None:
    usual = DeviceSteps.launch

    def launch(self: DeviceSteps, *given: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and given[0] == 1:
            raise ValueError("nothing of CUDA's")
        return usual(self, *given)

    patch.setattr(DeviceSteps, "launch", launch)


UNCAPTURED: dict[str, tuple[Plant, str, str]] = {
    "waits for what is not captured": (waits_in_vain, "kcache", "isolation"),
    "leaves a stream behind": (without(DeviceSteps, "join"), "exact", "unjoined"),
    "waits for the device": (waits_for_the_device, "exact", "sync"),
    "fails by itself": (fails_by_itself, "exact", "nothing of CUDA's"),
}


@pytest.mark.parametrize("planted", UNCAPTURED)
def test_a_capture_that_fails_leaves_no_trace(
    planted: str, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant, form, why = UNCAPTURED[planted]
    ran = stepped(world, {**FORMS[form], "replay": False}, 6)
    plant(monkeypatch)
    forget_warnings()
    with caplog.at_level(logging.WARNING):
        tried = stepped(world, FORMS[form], 6)
    assert "can't be captured as a CUDA graph" in caplog.text and why in caplog.text
    assert not world.replays and world.current is world.main
    assert not world.recording and not +world.pools and world.capture is None
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(ran.outputs, tried.outputs, strict=True))
    if planted != "leaves a stream behind":
        assert not world.found


def test_a_capture_waits_for_nothing_and_runs_on_a_stream_of_its_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = CudaRecorder(torch.device("cuda", 1))
    monkeypatch.delattr(torch.cuda, "synchronize")
    monkeypatch.delattr(torch.cuda, "empty_cache")
    seen: list[Any] = []
    given = torch.ones(3)

    def run() -> list[torch.Tensor]:
        seen.extend([torch.cuda.current_device(), torch.cuda.current_stream(), gc.isenabled()])
        return [given + 1]

    results, replay = recorder.record(run, lambda *_: ())
    device, stream, collects = seen
    assert (device, stream.device.index, stream.priority) == (1, 1, cuda_streams.COMPUTES)
    assert not collects and gc.isenabled() and torch.cuda.current_device() == 0
    given.fill_(4)
    replay()
    assert results[0].tolist() == [5.0] * 3 and world.replays == 2
    other = CudaRecorder(torch.device("cuda", 0))
    other.record(run, lambda *_: ())
    assert seen[3] == 0 and seen[4].device.index == 0


def test_a_capture_that_finds_no_memory_empties_the_cache_and_tries_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied, tries = list[int](), list[int]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(tries)))

    def run() -> list[torch.Tensor]:
        tries.append(1)
        if not emptied:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [torch.ones(1)]

    recorder = CudaRecorder(CUDA)
    results, _ = recorder.record(run, lambda *_: ())
    assert emptied == [1] and len(tries) == 2 and results[0].tolist() == [1.0]


def test_a_step_that_finds_no_memory_halfway_is_captured_at_the_second_try(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, failed = DeviceSteps.launch, list[int]()

    def launch(self: DeviceSteps, layer: int, *given: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and layer and not failed:
            failed.append(layer)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(self, layer, *given)

    monkeypatch.setattr(DeviceSteps, "launch", launch)
    decoder = stepped(world, FORMS["exact"], 6)
    assert failed and world.replays >= 3 and not world.found
    assert decoder.session.graph is not None and decoder.session.graph.records


def test_captures_of_a_session_share_a_pool_that_is_never_without_a_graph(world: World) -> None:
    """A pool that was given back is not taken again: torch asserts that, until its cache is emptied."""
    recorder = CudaRecorder(CUDA)
    for value in range(3):
        given = torch.full((2,), float(value))
        results, replay = recorder.record(lambda given=given: [given + 1], lambda *_: ())  # type: ignore[misc]
        assert results[0].tolist() == [value + 1] * 2
        del results, replay  # as `StepGraph` does first
        assert list(world.pools.values()) == [1]
    del recorder
    gc.collect()
    assert not +world.pools


# Threads --------------------------------------------------------------------------------------------------------------


def transfer() -> CudaTransfer:
    host = HostCache(1, [(1, 4, 4)], torch.float32)
    host.append(0, torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4))
    return CudaTransfer(host, 2, torch.device("cpu"))


def in_a_capture(world: World, other: Callable[[], object]) -> list[BaseException]:
    """Capture a copy, and meanwhile have another thread do something; returns what that one failed with."""
    one, failed = transfer(), list[BaseException]()
    stream, graph = cuda_streams.lend(one, CUDA, cuda_streams.COMPUTES), torch.cuda.CUDAGraph()
    wanted = torch.tensor([[[1, 2]]], dtype=torch.int32)
    one.staging(0).wanted.copy_(wanted)
    one.prefetch_wanted(0)  # compiles, and allocates
    one.join()

    def work() -> None:
        try:
            with world:
                other()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)

    def run() -> list[Any]:
        one.prefetch_wanted(0)
        thread.start()
        thread.join(0.3)
        one.join()
        return []

    try:
        cuda_streams.capture(graph, stream, "pool", run)
    except RuntimeError as error:
        failed.append(error)
    thread.join(10)
    assert not thread.is_alive()
    return failed


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_beside_a_capture_is_not_captured(
    shared: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:  # as torch's pool has it, once it is through
        stream = world.new_stream()
        usual = cuda_streams.lend
        monkeypatch.setattr(
            cuda_streams,
            "lend",
            lambda owner, device, at=cuda_streams.COPIES: (
                usual(owner, device, at) if at == cuda_streams.COMPUTES else stream
            ),
        )
    two = transfer()
    failed = in_a_capture(world, lambda: two.prefetch(0, torch.tensor([[[3, -1]]], dtype=torch.int32)))
    assert bool(failed or world.found) == shared


@pytest.mark.parametrize("locked", [False, True])
def test_a_wait_for_the_device_waits_for_a_capture_first(locked: bool, world: World) -> None:
    wait = cuda_streams.synchronize if locked else torch.cuda.synchronize
    failed = in_a_capture(world, lambda: wait(CUDA))
    assert bool(failed) != locked


@pytest.mark.parametrize("locked", [False, True])
def test_the_cache_is_emptied_behind_a_capture(locked: bool, world: World) -> None:
    def empty() -> None:
        if locked:
            cuda_streams.empty_cache(CUDA)
        else:
            torch.cuda.empty_cache()

    assert bool(in_a_capture(world, empty)) != locked


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_its_parents_capture() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with cuda_streams._one_at_a_time:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    child = os.fork()
    if not child:
        os._exit(not cuda_streams._one_at_a_time.acquire(timeout=2))
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()


def test_a_stream_is_torchs_where_cuda_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pointers:
        def cudaStreamCreateWithPriority(self, made: Any, flags: int, priority: int) -> int:
            made._obj.value = 4096 - priority
            assert flags == 1  # it waits for nothing on the default stream
            return 0

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: ("made", pointer, device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: ("torch's", device, priority))
    monkeypatch.setattr(cudart, "library", Pointers)
    assert cuda_streams._made(CUDA, cuda_streams.COMPUTES) == ("made", 4097, CUDA)

    def missing() -> Any:
        raise OSError("this torch has no cudaStreamCreateWithPriority")

    monkeypatch.setattr(cudart, "library", missing)
    assert cuda_streams._made(CUDA, cuda_streams.COMPUTES) == ("torch's", CUDA, cuda_streams.COMPUTES)


def test_streams_are_lent_to_one_owner_at_a_time(world: World) -> None:
    class Owner:
        pass

    owners = [Owner() for _ in range(40)]
    lent = [cuda_streams.lend(owner, CUDA) for owner in owners]
    assert len(set(map(id, lent))) == 40
    del owners
    again = [cuda_streams.lend(lent, CUDA) for lent in [Owner()] * 3]
    assert {id(each) for each in again} <= {id(each) for each in lent}
