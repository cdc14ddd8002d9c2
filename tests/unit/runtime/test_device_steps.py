"""A layer's step as launches that are the same at every length gives what its operators give one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.kinds_of_layers import Kinds
from support.triton_mode import DEVICE, needs_triton

from specache_fx.config import SpecacheConfig
from specache_fx.runtime import host_cache, ops, registry  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.decode_step import DecodeStep
from specache_fx.runtime.layout import LayerShape
from specache_fx.runtime.session import Session
from specache_fx.runtime.transfer import KernelTransfer
from specache_fx.runtime.triton_steps import TritonSteps

pytestmark = [needs_triton, pytest.mark.gpu]
BATCH, HEADS, KV_HEADS = 2, 4, 2
USUAL = {"kernel": "triton", "bits": 2, "group_size": 4, "residual_length": 3, "top_k": 5}


class Twins:
    """Two sessions of the same tokens: one is stepped by operators, the other by one operator a layer."""

    def __init__(
        self,
        tokens: int = 28,
        dims: tuple[int, int] = (16, 16),
        padding: int = 0,
        dtype: torch.dtype = torch.float32,
        layers: int = 2,
        **options: Any,
    ) -> None:
        self.dims, self.dtype, self.layers = dims, dtype, layers
        self.generator = torch.Generator().manual_seed(0)
        self.given: list[torch.Tensor] = []  # what the operator got last
        config = SpecacheConfig(**(USUAL | options))
        shapes = (LayerShape(KV_HEADS, *dims),) * layers
        self.sessions = [Session(config, shapes, dtype, DEVICE) for _ in range(2)]
        mask = torch.ones(BATCH, 1, tokens, dtype=torch.bool, device=DEVICE)
        mask[1, :, :padding] = False
        for layer in range(layers):
            key, value = self.pair(tokens)
            for session in self.sessions:
                session.store(layer, key, value, mask)
        for session in self.sessions:
            session.advance(tokens, decoded=False)
        self.step(predecode=True)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def pair(self, tokens: int, *lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads = (*lanes, BATCH, KV_HEADS, tokens)
        return self.random(*heads, self.dims[0]), self.random(*heads, self.dims[1])

    @property
    def steps(self) -> TritonSteps:
        steps = self.sessions[1].steps
        assert isinstance(steps, TritonSteps)
        return steps

    def step(
        self, lanes: int = 2, predecode: bool = False, told: dict[str, Any] | None = None, **form: Any
    ) -> None:
        """One step of both; `told` goes to `DecodeStep`."""
        whole = tuple(range(self.layers))
        by_ops, in_one = (
            DecodeStep(session, predecode, each, **(told or {}))
            for session, each in zip(self.sessions, ((), whole), strict=True)
        )
        close = {"rtol": 1e-4, "atol": 1e-5} if self.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        with in_one.running():
            for layer in whole:
                query = self.random(lanes, BATCH, HEADS, 1, self.dims[0])
                key, value = self.pair(1, lanes)
                self.given = [side.clone() for side in (query, key, value)]
                state = self.sessions[1].state
                out = torch.ops.specache.device_step.default(*self.given, state, layer, 0.3, *form.values())
                by_ops.wait_prefetch(layer)
                wanted = by_ops.attend(layer, query, key, value, 0.3, True, **form)
                by_ops.append(layer, key[0], value[0])
                by_ops.prefetch(layer, by_ops.select(layer))
                torch.testing.assert_close(out, wanted, **close)
        for layer in whole:
            states = [self.state(session, layer) for session in self.sessions]
            for ours, theirs in zip(*states, strict=True):
                assert torch.equal(ours, theirs)
        if predecode:
            return
        for session in self.sessions:
            session.advance(1, decoded=True)
        ours, theirs = (session.metrics.hits for session in self.sessions)
        torch.testing.assert_close(tuple(ours), tuple(theirs))

    def accept(self) -> None:
        """Count the pairs of lane 1 that the last step has written."""
        for session in self.sessions:
            for layer in session.layers:
                layer.was_appended()
            session.advance(1, decoded=True)

    @staticmethod
    def state(session: Session, layer: int) -> list[torch.Tensor]:
        cache, transfer = session.tiered[layer], session.transfer
        assert transfer is not None
        rows, indices = transfer.wait(layer)
        held = transfer.staging(layer)
        return [*cache.window(), *session.load(layer), rows[indices >= 0], indices, held.wanted]

    def close(self) -> None:
        for session in self.sessions:
            session.close()


OPTIONS = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([1, 2, 4]),
        "quantizer": st.sampled_from(["turboquant", "kivi"]),
        "group_size": st.sampled_from([3, 4]),
        "residual_length": st.sampled_from([0, 3]),
        "top_k": st.sampled_from([1, 4, 40]),
        "reserve": st.sampled_from([0, 0, 64]),
        "tokens": st.sampled_from([2, 9, 30]),
        "padding": st.sampled_from([0, 0, 5]),
        "dims": st.sampled_from([(16, 16), (20, 24)]),
    }
)


@given(OPTIONS, st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=examples(2))
def test_steps_equal_the_operators(options: dict[str, Any], lanes: int, shared: bool) -> None:
    options["padding"] = min(options["padding"], options["tokens"] - 1)
    twins = Twins(layers=1, **options)
    shares = torch.tensor([0.3, 0.8], device=DEVICE) if shared and lanes == 2 else None
    for _ in range(options["group_size"] + 1):  # a group fills
        twins.step(lanes, told={"shares": shares})
    twins.close()


@pytest.mark.parametrize(
    ("padding", "masked", "policy"),
    [
        pytest.param(0, False, "specache", marks=pytest.mark.nightly),
        pytest.param(3, True, "specache", marks=pytest.mark.nightly),
        (3, True, "kivi"),
    ],
)
def test_windows_and_layers_that_select_nothing_are_stepped_too(
    padding: int, masked: bool, policy: str
) -> None:
    step = torch.ops.specache.device_step.default
    kinds = Kinds(DEVICE, step, 24, padding, kernel="triton", reserve=30, policy=policy)
    steps = kinds.sessions[1].steps
    assert isinstance(steps, TritonSteps)
    kinds.step(masked=masked)
    generation = steps.generation
    for _ in range(3):
        kinds.step(masked=masked)
    assert steps.generation == generation  # a window that is full doesn't move
    kinds.close()


def test_table_of_the_hosts_blocks_that_moves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "_LEAST_BLOCKS", 1)
    twins = Twins(tokens=66, layers=1, top_k=40)
    host = twins.sessions[1].host
    assert host is not None
    blocks = int(host.table(0)[0])
    for _ in range(7):  # the arena grows first; beyond 64 quantised tokens the host has another block
        twins.step()
    assert host.table(0)[0] > blocks
    twins.close()


def test_forms_of_attention_and_16_bit_dtypes() -> None:
    twins = Twins(dtype=torch.bfloat16, layers=1)
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        twins.step(softcap=5.0, sinks=sinks)
    twins.close()


def test_biases_come_and_go_and_rows_that_missed_choose_alone() -> None:
    twins = Twins(layers=1, padding=3)
    twins.step()
    kv_len = twins.sessions[0].kv_len
    bias = torch.randn(2, 1, HEADS, kv_len + 2, generator=twins.generator).to(DEVICE)
    twins.step(told={"biases": {0: bias}})
    twins.step(told={"missed": torch.tensor([True, False], device=DEVICE)})
    for _ in range(3):
        twins.step()
    twins.close()


@pytest.mark.parametrize("quantizer", ["turboquant", "kivi"])
def test_what_runs_beside_reads_nothing_that_the_model_may_overwrite(
    quantizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(layers=1, quantizer=quantizer)
    kind = type(twins.sessions[1].transfer)
    usual = kind.beside

    @contextlib.contextmanager
    def late(transfer: KernelTransfer, layer: int) -> Iterator[None]:
        for side in twins.given:
            side.fill_(torch.nan)
        with usual(transfer, layer):
            yield

    monkeypatch.setattr(kind, "beside", late)
    for _ in range(3):
        twins.step()
    twins.close()


def test_launches_stay_where_they_are_until_an_arena_moves() -> None:
    twins = Twins(tokens=26, reserve=30, padding=2, layers=1)
    twins.step()
    held, generations = twins.steps, set()
    for _ in range(3):
        twins.step()
        generations.add(held.generation)
    assert len(generations) == 1
    for _ in range(8):
        twins.step()
        generations.add(held.generation)
    assert len(generations) > 1
    twins.close()


def test_layer_that_was_not_told_or_has_run_is_refused() -> None:
    twins = Twins(layers=1)
    session = twins.sessions[1]
    own = twins.random(2, BATCH, HEADS, 1, 16), *twins.pair(1, 2)
    with pytest.raises(RuntimeError, match="layer 0 is not to run now"):
        twins.steps.launch(0, *own, 0.3)
    with DecodeStep(session, whole=(0,)).running():
        twins.steps.launch(0, *own, 0.3)
        with pytest.raises(RuntimeError, match="layer 0 is not to run now"):
            twins.steps.launch(0, *own, 0.3)
    twins.close()


def test_bytes_of_the_steps_are_the_sessions() -> None:
    twins = Twins()
    session = twins.sessions[1]
    room = session.tiered[0].room
    scores = 2 * BATCH * KV_HEADS * (room + 1) * 4
    kept = 2 * 2 * BATCH * (HEADS + KV_HEADS) * 16 * 4  # of two layers and lanes, queries and own keys
    assert twins.steps.device_bytes > scores + kept
    before = session.device_bytes
    twins.steps.close()
    assert before - session.device_bytes > scores + kept
    twins.close()


@pytest.mark.parametrize(
    "options",
    [
        {"sink_tokens": 2},
        {"kernel": "reference"},
        {"lookahead": "none"},
        {"host": "disk"},
        {"quantizer": "nuq"},
    ],
    ids=lambda o: next(iter(o)),
)
def test_sessions_that_they_do_not_serve(options: dict[str, Any]) -> None:
    session = Session(SpecacheConfig(**(USUAL | options)), (LayerShape(2, 8, 8),), torch.float32, DEVICE)
    session.store(0, torch.randn(2, 2, 40, 8, device=DEVICE), torch.randn(2, 2, 40, 8, device=DEVICE), None)
    assert session.steps is None
    session.close()


@pytest.mark.parametrize("bits", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_pairs_of_lane_1_are_there_where_they_are_accepted(bits: int) -> None:
    twins = Twins(tokens=29, bits=bits, group_size=8, residual_length=8)
    accepted = 0
    for _ in range(12):
        fills = [not (twins.sessions[0].kv_len + ahead - 8) % 8 for ahead in (1, 2)]
        twins.step(told={"writes_next": not fills[0]})
        if not any(fills):
            twins.accept()
            accepted += 1
    assert accepted > 5
