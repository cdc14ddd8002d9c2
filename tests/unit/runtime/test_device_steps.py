"""A layer's step as launches that are the same at every length gives what its operators give one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import twins
from support.cases import examples, nightly_unless
from support.strategies import AttentionShape
from support.triton_mode import DEVICE, needs_triton

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.host import host_cache
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.session import registry  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.steps.triton_steps import TritonSteps
from specache_fx.runtime.transfer import KernelTransfer

pytestmark = [needs_triton, pytest.mark.gpu]
BATCH, HEADS, KV_HEADS = 2, 4, 2
USUAL = {
    "kernel": "triton",
    "lookahead": "token",
    "bits": 2,
    "group_size": 4,
    "residual_length": 3,
    "top_k": 5,
}


class Twins(twins.Twins):
    def __init__(
        self,
        tokens: int = 28,
        dims: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
        layers: int = 2,
        padding: int = 0,
        **options: Any,
    ) -> None:
        step, config = torch.ops.specache.device_step.default, SpecacheConfig(**(USUAL | options))
        shape = AttentionShape(BATCH, HEADS, KV_HEADS, *dims)
        close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        super().__init__(step, config, shape, tokens, dtype, layers, padding, DEVICE, close)

    @property
    def steps(self) -> TritonSteps:
        steps = self.sessions[1].steps
        assert isinstance(steps, TritonSteps)
        return steps

    def accept(self) -> None:
        """Count the pairs of lane 1 that the last step has written."""
        for session in self.sessions:
            for layer in session.layers:
                layer.was_appended()
            session.advance(1, decoded=True)


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
    pair = Twins(layers=1, **options)
    shares = torch.tensor([0.3, 0.8], device=DEVICE) if shared and lanes == 2 else None
    for _ in range(options["group_size"] + 1):  # a group fills
        pair.step(lanes, told={"shares": shares})
    pair.close()


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
    kinds = twins.Kinds(step, 24, padding, DEVICE, kernel="triton", reserve=30, policy=policy)
    steps = kinds.sessions[1].steps
    assert isinstance(steps, TritonSteps)
    kinds.masked_step(masked=masked)
    generation = steps.generation
    for _ in range(3):
        kinds.masked_step(masked=masked)
    assert steps.generation == generation  # a window that is full doesn't move
    kinds.close()


def test_table_of_the_hosts_blocks_that_moves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "_LEAST_BLOCKS", 1)
    pair = Twins(tokens=66, layers=1, top_k=40)
    host = pair.sessions[1].host
    assert host is not None
    blocks = int(host.table(0)[0])
    for _ in range(7):  # the arena grows first; beyond 64 quantised tokens the host has another block
        pair.step()
    assert host.table(0)[0] > blocks
    pair.close()


def test_forms_of_attention_and_16_bit_dtypes() -> None:
    pair = Twins(dtype=torch.bfloat16, layers=1)
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        pair.step(softcap=5.0, sinks=sinks)
    pair.close()


def test_biases_come_and_go_and_rows_that_missed_choose_alone() -> None:
    pair = Twins(layers=1, padding=3)
    pair.step()
    kv_len = pair.sessions[0].kv_len
    bias = torch.randn(2, 1, HEADS, kv_len + 2, generator=pair.generator).to(DEVICE)
    pair.step(told={"biases": {0: bias}})
    pair.step(told={"missed": torch.tensor([True, False], device=DEVICE)})
    for _ in range(3):
        pair.step()
    pair.close()


@pytest.mark.parametrize("quantizer", nightly_unless("turboquant".__eq__, ["turboquant", "kivi"]))
def test_what_runs_beside_reads_nothing_that_the_model_may_overwrite(
    quantizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Twins(layers=1, quantizer=quantizer)
    kind = type(pair.sessions[1].transfer)
    usual = kind.beside

    @contextlib.contextmanager
    def late(transfer: KernelTransfer, layer: int) -> Iterator[None]:
        for side in pair.given:
            side.fill_(torch.nan)
        with usual(transfer, layer):
            yield

    monkeypatch.setattr(kind, "beside", late)
    for _ in range(3):
        pair.step()
    pair.close()


def test_launches_stay_where_they_are_until_an_arena_moves() -> None:
    pair = Twins(tokens=26, reserve=30, padding=2, layers=1)
    pair.step()
    held, generations = pair.steps, set()
    for _ in range(3):
        pair.step()
        generations.add(held.generation)
    assert len(generations) == 1
    for _ in range(3):
        pair.step()
        generations.add(held.generation)
    assert len(generations) > 1
    pair.close()


def test_layer_that_was_not_told_or_has_run_is_refused() -> None:
    pair = Twins(layers=1)
    session = pair.sessions[1]
    own = pair.own(2)
    with pytest.raises(RuntimeError, match="layer 0 is not to run now"):
        pair.steps.launch(0, *own, 0.3)
    with DecodeStep(session, fused_layers=(0,)).running():
        pair.steps.launch(0, *own, 0.3)
        with pytest.raises(RuntimeError, match="layer 0 is not to run now"):
            pair.steps.launch(0, *own, 0.3)
    pair.close()


def test_bytes_of_the_steps_are_the_sessions() -> None:
    pair = Twins()
    session = pair.sessions[1]
    room = session.tiered[0].room
    scores = 2 * BATCH * KV_HEADS * (room + 1) * 4
    kept = 2 * 2 * BATCH * (HEADS + KV_HEADS) * 16 * 4  # of two layers and lanes, queries and own keys
    assert pair.steps.device_bytes > scores + kept
    before = session.device_bytes
    pair.steps.close()
    assert before - session.device_bytes > scores + kept
    pair.close()


@twins.not_served
def test_sessions_that_they_do_not_serve(options: dict[str, Any]) -> None:
    session = Session(SpecacheConfig(**(USUAL | options)), (LayerShape(2, 8, 8),), torch.float32, DEVICE)
    session.store(0, torch.randn(2, 2, 40, 8, device=DEVICE), torch.randn(2, 2, 40, 8, device=DEVICE), None)
    assert session.steps is None
    session.close()


@pytest.mark.parametrize("bits", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_pairs_of_lane_1_are_there_where_they_are_accepted(bits: int) -> None:
    pair = Twins(tokens=29, bits=bits, group_size=8, residual_length=8, layers=1)
    accepted = 0
    for _ in range(8):
        fills = [not (pair.sessions[0].kv_len + ahead - 8) % 8 for ahead in (1, 2)]
        pair.step(told={"writes_next": not fills[0]})
        if not any(fills):
            pair.accept()
            accepted += 1
    assert accepted > 4
