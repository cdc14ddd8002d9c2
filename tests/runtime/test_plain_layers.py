"""A layer's step in C++ alone gives the bits that its operators give one by one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st
from support import strategies
from transformers import LlamaConfig, LlamaForCausalLM

import specache_fx
from specache_fx.config import SpecacheConfig
from specache_fx.errors import HostMemoryError, SpecacheError
from specache_fx.runtime import native, ops  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.decode_step import DecodeStep
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.layout import LayerShape
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.plain_layers import PlainLayers
from specache_fx.runtime.select import SELECTORS, select_topk
from specache_fx.runtime.session import Session
from specache_fx.runtime.tracing import recording

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(graph_ops.load() is None, reason="there is no C++ compiler")
Own = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def in_one_call(
    own: Own, session: Session, scale: float, softcap: float | None = None, sinks: Any = None
) -> torch.Tensor:
    out = torch.ops.specache.layer_step.default(*own, session.state, 0, scale, softcap, sinks)
    assert isinstance(out, torch.Tensor)
    return out


class Twins:
    """Two sessions of the same tokens: one is stepped by operators, the other in one call where that goes."""

    def __init__(
        self, config: SpecacheConfig, shape: strategies.AttentionShape, dtype: torch.dtype, tokens: int
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.generator = torch.Generator().manual_seed(0)
        layer = LayerShape(shape.num_kv_heads, shape.head_dim, shape.value_dim)
        self.sessions = [Session(config, (layer,), dtype, CPU) for _ in range(2)]
        key, value = (
            self.random(shape.num_kv_heads, tokens, dim) for dim in (shape.head_dim, shape.value_dim)
        )
        for session in self.sessions:
            session.store(0, key, value, None)
            session.advance(tokens, decoded=False)
        self.whole = 0
        self.step(predecode=True)

    def random(self, heads: int, tokens: int, dim: int, *lanes: int) -> torch.Tensor:
        shape = (*lanes, self.shape.batch, heads, tokens, dim)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def own(self, lanes: int) -> Own:
        shape = self.shape
        sides = (shape.num_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim)
        query, key = (self.random(heads, 1, dim, lanes) for heads, dim in sides)
        return query, key, self.random(shape.num_kv_heads, 1, shape.value_dim, lanes)

    def step(
        self, lanes: int = 2, predecode: bool = False, biases: Any = None, layout: str = "", **form: Any
    ) -> bool:
        """One step of both. Returns whether the second made it in one call."""
        own = self.own(lanes)
        if layout == "turned":  # in memory batch rows come last
            own = tuple(x.transpose(1, 4).contiguous().transpose(1, 4) for x in own)
        if layout == "fused":  # parts of one projection
            rows = [x.transpose(2, 3).flatten(3) for x in own]
            parts = torch.cat(rows, -1).split([row.shape[-1] for row in rows], -1)
            own = tuple(
                part.unflatten(-1, (x.shape[2], -1)).transpose(2, 3)
                for x, part in zip(own, parts, strict=True)
            )
        scale = form.pop("scale", 0.3)
        by_ops, in_one = (DecodeStep(session, predecode, biases or {}) for session in self.sessions)
        with in_one.running():
            out = in_one_call(own, self.sessions[1], scale, **form)
        whole = in_one.num_plain == 1
        assert torch.equal(out, self.by_operators(by_ops, own, scale, form))
        assert self.sessions[0].layers[0].kv_len == self.sessions[1].layers[0].kv_len
        states = [self.state(session) for session in self.sessions]
        assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))
        if not predecode:
            for session in self.sessions:
                session.advance(1, decoded=True)
            ours, theirs = (session.metrics.hits for session in self.sessions)
            assert ours == theirs
        self.whole += whole
        return whole

    @staticmethod
    def by_operators(step: DecodeStep, own: Own, scale: float, form: dict[str, Any]) -> torch.Tensor:
        query, key, value = own
        step.wait_prefetch(0)
        out = step.attend(0, query, key, value, scale, True, **form)
        step.append(0, key[0], value[0])
        step.prefetch(0, step.select(0))
        return out

    @staticmethod
    def state(session: Session) -> list[torch.Tensor]:
        cache, engine = session.layers[0], session.engine
        assert engine is not None
        rows, indices = engine.wait(0)
        wanted = engine.wanted(0)
        assert wanted is not None
        return [*cache.window(), *session.load(0), rows[indices >= 0], indices, wanted]

    def close(self) -> None:
        for session in self.sessions:
            session.close()


SHAPE = strategies.AttentionShape(batch=2, num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8)


def twins(tokens: int = 40, dtype: torch.dtype = torch.float32, **options: Any) -> Twins:
    config = SpecacheConfig(**{"bits": 2, "group_size": 8, "residual_length": 8, "top_k": 4, **options})
    return Twins(config, SHAPE, dtype, tokens)


@settings(max_examples=40)
@given(
    config=strategies.configs(policy="specache"),
    tracked=st.sampled_from((True, False, "steps")),
    shape=strategies.attention_shapes(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    lanes=st.integers(1, 2),
    tokens=st.integers(1, 90),
    layout=st.sampled_from(["", "fused"]),
)
def test_steps_are_the_same_bits(
    config: SpecacheConfig,
    tracked: Any,
    shape: strategies.AttentionShape,
    dtype: torch.dtype,
    lanes: int,
    tokens: int,
    layout: str,
) -> None:
    # The graph of a resident layer has no such step, and sinks are left to the operators.
    options = {"track_hit_rates": tracked, "resident_layers": 0, "sink_tokens": 0}
    pair = Twins(replace(config, **options), shape, dtype, tokens)
    for _ in range(12):
        pair.step(lanes, layout=layout)
    target(pair.whole)
    pair.close()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("tracked", [True, False, "steps"])
def test_one_call_chooses_by_the_last_lane_and_counts_by_the_first(lanes: int, tracked: Any) -> None:
    pair = twins(tokens=200, track_hit_rates=tracked, group_size=16, residual_length=16)
    for _ in range(14):
        pair.step(lanes)
    assert pair.whole == 10  # a window grows, a group fills
    assert (pair.sessions[1].metrics.hits.topk_needed > 0) == bool(tracked)
    pair.close()


def test_all_steps_but_those_around_a_new_group_are_one_call() -> None:
    pair = twins()
    # A window that grows, too, has another memory from then on.
    first, group = [False, False] + [True] * 5 + [False], [False] + [True] * 6 + [False]
    assert [pair.step() for _ in range(24)] == first + group + group
    pair.close()


@pytest.mark.parametrize(
    "form",
    [{"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"scale": 0.5}],
    ids=lambda form: next(iter(form)),
)
def test_forms_of_attention_go_in_one_call_too(form: dict[str, Any]) -> None:
    pair = twins()
    assert [pair.step(**form) for _ in range(4)] == [False, False, True, True]
    # Of another form nothing is known yet.
    assert pair.step(**{**form, "softcap": 3.0}) is False
    assert pair.step(**{**form, "softcap": 3.0}) is True
    assert pair.step(**{**form, "softcap": 3.0, "scale": 0.7}) is False
    pair.close()


def changes() -> dict[str, Callable[[Twins], Any]]:
    def crop(pair: Twins) -> None:
        for session in pair.sessions:
            session.rewind(session.kv_len - 20)

    def reorder(pair: Twins) -> None:
        for session in pair.sessions:
            session.reorder([1, 0])

    def extend(pair: Twins) -> None:
        key, value = pair.random(2, 3, 8), pair.random(2, 3, 8)
        for session in pair.sessions:
            session.store(0, key, value, None)
            session.forget_lookahead()
            session.advance(3, decoded=False)

    return {"crop": crop, "reorder": reorder, "extend": extend}


@pytest.mark.parametrize("name", changes())
def test_what_changes_a_session_between_two_steps_is_seen(name: str) -> None:
    pair = twins(tokens=44)
    for _ in range(3):
        pair.step()
    changes()[name](pair)
    for _ in range(4):
        pair.step()
    assert pair.whole
    pair.close()


@pytest.mark.parametrize(
    "options",
    [{"sink_tokens": 2}, {"kernel": "reference"}],
    ids=lambda o: next(iter(o)),
)
def test_what_one_call_does_not_know_is_left_to_the_operators(options: dict[str, Any]) -> None:
    pair = twins(**options)
    for _ in range(4):
        pair.step()
    assert not pair.whole
    pair.close()


def test_a_mask_that_begins_to_hide_and_one_that_ends_are_seen() -> None:
    pair = twins()
    for _ in range(4):
        pair.step()
    stored = pair.sessions[0].kv_len
    bias = torch.zeros(2, 2, 1, stored + 2).index_fill(3, torch.tensor([3, 20, stored]), -torch.inf)
    assert not pair.step(biases={0: bias})
    assert [pair.step() for _ in range(2)] == [False, True]
    pair.close()


def test_other_lanes_and_layouts_are_seen() -> None:
    pair = twins()
    assert [pair.step() for _ in range(3)] == [False, False, True]
    assert [pair.step(lanes=1) for _ in range(2)] == [False, True]
    assert not pair.step(lanes=1, layout="turned")
    pair.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_fused_projection_go_in_one_call_too(dtype: torch.dtype) -> None:
    pair = twins(dtype=dtype)
    assert [pair.step(layout="fused") for _ in range(4)] == [False, False, True, True]
    assert pair.step()
    assert pair.step(layout="fused")
    pair.close()


def test_another_selector_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def selector(scores: torch.Tensor, top_k: int) -> torch.Tensor:
        asked.append(top_k)
        return select_topk(scores, top_k)

    monkeypatch.setitem(SELECTORS, "asked", selector)
    pair = twins(selector="asked")
    for _ in range(4):
        pair.step()
    assert not pair.whole and len(asked) == 2 * 5
    pair.close()


def test_a_full_window_has_no_room() -> None:
    pair = twins()
    room = []
    for _ in range(4):
        cache = pair.sessions[0].layers[0]
        assert isinstance(cache, LayerCache)
        room.append((cache.has_room, cache.window_rows[0].shape[2] > cache.window_len))
        pair.step()
    assert room == [(False, False)] + [(True, True)] * 3
    pair.close()


def test_a_trace_shows_the_operators() -> None:
    pair = twins()
    for _ in range(3):
        pair.step()
    with recording():
        assert not pair.step()
    assert pair.step()
    pair.close()


@pytest.mark.parametrize("which", [0, 1], ids=["selection", "counts"])
def test_without_memory_nothing_is_changed_and_the_operators_go_on(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins()
    for _ in range(3):
        pair.step()
    real = native.addresses()
    assert real is not None
    # Memory that runs out in the middle of the call is the one thing that can't be had for real.
    failed = []
    fails = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: failed.append(which) or 1)
    broken = list(real)
    broken[which] = ctypes.cast(fails, ctypes.c_void_p).value
    memory = pair.sessions[1].layers[0].kernel_memory
    with monkeypatch.context() as patch:
        patch.setattr(native, "addresses", lambda: tuple(broken))
        del memory["plain"]
        assert not pair.step()
    del memory["plain"]
    assert failed == [which]
    assert not pair.sessions[1].score_buffers._taken
    assert pair.step()
    pair.close()


def test_what_an_operator_fails_with_comes_out_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    pair = twins()
    session = pair.sessions[1]
    assert session.engine is not None
    session.engine.close()
    kv_len, step = session.kv_len, DecodeStep(session)
    with pytest.raises(SpecacheError, match="copy engine is closed") as raised, step.running():
        in_one_call(pair.own(2), session, 0.3)
    assert graph_ops.take_failure() is None
    assert raised.traceback[-1].name == "prefetch"
    assert session.kv_len == kv_len
    assert capfd.readouterr() == ("", "")
    pair.close()


def test_what_a_copy_failed_with_is_raised_before_the_step() -> None:
    pair = twins()
    for _ in range(3):
        pair.step()
    session = pair.sessions[1]
    chosen = session.engine.wanted(0).clone()
    chosen[0, 0, 0] = 10_000
    session.engine.prefetch(0, chosen)
    kv_len = session.layers[0].kv_len
    with pytest.raises(IndexError, match="Token 10000 of layer 0"), DecodeStep(session).running():
        pytest.fail("the graph was run")
    assert session.layers[0].kv_len == kv_len and not session.score_buffers._taken
    pair.close()


def test_a_step_that_fails_between_two_layers_has_done_the_first() -> None:
    pair = twins()
    for _ in range(3):
        pair.step()
    session = pair.sessions[1]
    kv_len, step = session.layers[0].kv_len, DecodeStep(session)
    with contextlib.suppress(ZeroDivisionError), step.running():
        in_one_call(pair.own(2), session, 0.3)
        raise ZeroDivisionError
    assert (step.num_plain, session.layers[0].kv_len) == (1, kv_len + 1)
    assert not session.score_buffers._taken
    pair.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_may_be_of_the_models_dtype_and_end(dtype: torch.dtype) -> None:
    pair = twins(dtype=torch.bfloat16)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)
    assert [pair.step(sinks=sinks) for _ in range(4)] == [False, False, True, True]
    assert pair.step()
    pair.close()


def test_a_layer_is_not_run_twice_in_a_step() -> None:
    pair = twins()
    for _ in range(3):
        pair.step()
    session, own = pair.sessions[1], pair.own(2)
    with DecodeStep(session).running():
        in_one_call(own, session, 0.3)
        with pytest.raises(RuntimeError, match="twice for layer 0"):
            in_one_call(own, session, 0.3)
    pair.close()


def test_a_step_within_another_ones_finds_its_own_layers() -> None:
    pairs = [twins(), twins(tokens=44)]
    for pair in pairs:
        for _ in range(3):
            pair.step()
    inner, outer = (pair.sessions[1] for pair in pairs)
    first, second = DecodeStep(outer), DecodeStep(inner)
    with first.running():
        with second.running():
            # The outer one's layers are not ready meanwhile: its operators run.
            in_one_call(pairs[1].own(2), outer, 0.3)
            in_one_call(pairs[0].own(2), inner, 0.3)
        assert second.num_plain == 1
    assert first.num_plain == 0
    assert outer.layers[0].kv_len == outer.kv_len + 1
    for pair in pairs:
        pair.close()


def test_what_an_operator_fails_with_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = twins()
    session = pair.sessions[1]

    def fail(*_: Any) -> None:
        raise HostMemoryError("no room") from OSError("the reason")

    monkeypatch.setattr(session.engine, "prefetch", fail)
    step = DecodeStep(session)
    with pytest.raises(HostMemoryError, match="no room") as raised, step.running():
        in_one_call(pair.own(2), session, 0.3)
    assert isinstance(raised.value.__cause__, OSError)
    monkeypatch.undo()
    pair.close()


def test_layers_are_ready_in_their_own_thread() -> None:
    """Two generations at once, each in a thread: what is ready in one is nothing to the other."""
    pairs = [twins(), twins(tokens=44)]
    failures = []
    begin = threading.Barrier(2)

    def generate(pair: Twins) -> None:
        begin.wait()
        try:
            for _ in range(30):
                pair.step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=generate, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(pair.whole >= 20 for pair in pairs)
    for pair in pairs:
        pair.close()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_compiled_model_takes_one_call_and_says_the_same(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        vocab_size=4096,  # several threads multiply
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    options = {"group_size": 8, "residual_length": 8, "top_k": 4, "lowering": "eager"}
    model.compile(backend="specache", options=options)
    run, fetched, end = [], [], PlainLayers.end

    def counted(layers: PlainLayers) -> None:
        end(layers)
        run.append(layers.num_run)

    def answer() -> list[torch.Tensor]:
        done = model.generate(
            torch.arange(40)[None],
            max_new_tokens=24,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        fetched.append(specache_fx.stats(done.past_key_values).prefetched_rows)
        return [done.sequences, *done.logits]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(PlainLayers, "end", counted)
            ours = answer()
            patch.setattr(PlainLayers, "get_ready", lambda session, shares: None)
            theirs = answer()
    finally:
        torch.set_num_threads(before)
    assert run.count(2) > 12
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert fetched[0] == fetched[1] > 0
