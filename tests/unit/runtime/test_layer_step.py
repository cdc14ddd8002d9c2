"""A layer's step in C++ alone gives the bits that its operators give one by one."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import strategies
from support.open_sessions import session_of
from support.threads import at_once, num_threads
from support.twins import Kinds, Twins, not_served
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

import specache_fx
from specache_fx.config import SpecacheConfig
from specache_fx.errors import HostMemoryError
from specache_fx.runtime.layers.layer_cache import LayerCache
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.session import registry  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.steps.step_table import LayerC, SessionC
from specache_fx.runtime.tracing import recording

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(graph_ops.load() is None, reason="there is no C++ compiler")
LAYER_STEP = torch.ops.specache.layer_step.default


def fails(*_: Any) -> int:
    return 1


SHAPE = strategies.AttentionShape(batch=2, num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8)


Make = Callable[..., Twins]


@pytest.fixture
def twins() -> Iterator[Make]:
    made: list[Twins] = []

    def make(tokens: int = 40, dtype: torch.dtype = torch.float32, **options: Any) -> Twins:
        small = {"bits": 2, "group_size": 8, "residual_length": 8, "top_k": 4, "lookahead": "token"}
        config = SpecacheConfig(**{**small, **options})
        made.append(Twins(LAYER_STEP, config, SHAPE, tokens, dtype))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def run(pair: Twins, steps: int, **told: Any) -> None:
    for _ in range(steps):
        pair.step(**told)


@settings(max_examples=60)
@given(
    config=strategies.configs(policy="specache"),
    tracked=st.sampled_from((True, False, "steps")),
    shape=strategies.attention_shapes(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    lanes=st.integers(1, 2),
    tokens=st.integers(1, 90),
    layout=st.sampled_from(["", "fused", "turned"]),
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
    # The graph of a resident layer has no such step, and what follows is left to the operators.
    shared_bytes = shape.value_dim > config.group_size and config.group_size * config.bits % 8
    assume(config.bits < 16 and not (shared_bytes and config.quantizer != "turboquant"))
    sinks = 0 if config.stages else config.sink_tokens
    config = replace(config, track_hit_rates=tracked, resident_layers=0, sink_tokens=sinks)
    pair = Twins(LAYER_STEP, config, shape, tokens, dtype)
    for _ in range(12):
        pair.step(1 if config.lookahead == "none" else lanes, layout=layout)
    pair.close()


@given(
    lanes=st.integers(1, 2),
    tokens=st.integers(2, 60),
    padding=st.sampled_from([0, 0, 3]),
    masked=st.booleans(),
    bits=st.sampled_from([1, 2]),
    policy=st.sampled_from(["specache", "kivi"]),
)
@settings(max_examples=30, deadline=None)
def test_windows_and_layers_that_select_nothing_are_stepped_too(
    lanes: int, tokens: int, padding: int, masked: bool, bits: int, policy: str
) -> None:
    coded = {"bits": bits, "policy": policy, "quantizer": "turboquant"}
    kinds = Kinds(LAYER_STEP, tokens, min(padding, tokens - 1), CPU, **coded)
    for _ in range(12):  # windows fill, are compacted and grow
        kinds.masked_step(lanes, masked)
    for session in kinds.sessions:
        session.rewind(session.kv_len - 1)
    kinds.real = kinds.real[:, :-1]
    for _ in range(2):
        kinds.masked_step(lanes, masked)
    kinds.close()


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("tokens", [4, 40])
def test_a_steps_own_scores_choose_its_pairs(twins: Make, tokens: int, bits: int) -> None:
    pair = twins(tokens, lookahead="none", key_share=None, bits=bits)
    run(pair, 20, lanes=1)  # groups fill
    copies = [session.transfer.metrics for session in pair.sessions if session.transfer is not None]
    assert copies[0].fetched_rows == copies[1].fetched_rows > 0
    assert copies[0].reused_rows == copies[1].reused_rows


def test_a_group_that_a_step_fills_is_prefetched_by_it(twins: Make) -> None:
    """Chosen before it is quantised, and brought once its rows are on the host."""
    pair = twins(tokens=40, top_k=40)
    cache, transfer = pair.sessions[1].layers[0], pair.sessions[1].transfer
    assert isinstance(cache, LayerCache) and transfer is not None
    quantized = [cache.num_quantized]
    for _ in range(16):
        pair.step()
        quantized.append(cache.num_quantized)
        assert set(transfer.wait(0)[1].flatten().tolist()) - {-1} == set(range(cache.num_quantized))
    assert quantized[-1] == quantized[0] + 16


STEPS: dict[str, list[dict[str, Any]]] = {
    "softcap": [{}, {"softcap": 2.0}] * 2,
    "sinks": [{}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}] * 2,
    "scale": [{}, {"scale": 0.5}] * 2,
    "lanes and layouts": [
        {"lanes": lanes, "layout": layout}
        for lanes, layout in ((2, ""), (1, ""), (1, "turned"), (2, "fused"), (2, "turned"), (2, ""))
    ],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_step_may_differ_from_the_one_before(twins: Make, steps: list[dict[str, Any]]) -> None:
    pair = twins()
    for told in steps:
        pair.step(**told)


def crop(pair: Twins, tokens: int = 20) -> None:
    for session in pair.sessions:
        session.rewind(session.kv_len - tokens)


def reorder(pair: Twins) -> None:
    for session in pair.sessions:
        session.reorder([1, 0])


def extend(pair: Twins, tokens: int = 3) -> None:
    key, value = pair.pair(tokens)
    for session in pair.sessions:
        session.store(0, key, value, None)
        session.forget_lookahead()
        session.advance(tokens, decoded=False)


@pytest.mark.parametrize("change", [crop, reorder, extend])
def test_what_changes_a_session_between_two_steps_is_seen(
    twins: Make, change: Callable[[Twins], None]
) -> None:
    pair = twins(tokens=44)
    run(pair, 3)
    change(pair)
    run(pair, 12)


def test_rows_of_a_group_that_is_cropped_and_filled_anew_are_the_new_ones(twins: Make) -> None:
    pair = twins(tokens=40, top_k=40)
    for back in (9, 17, 9):
        run(pair, 10)
        crop(pair, back)
        pair.step(predecode=True)
    run(pair, 20)


def test_rows_that_an_extend_brought_to_the_host_are_found(twins: Make) -> None:
    pair = twins(tokens=40, top_k=80, reserve=200)  # else the arena moves, and all is described anew
    pair.step()
    extend(pair, 40)
    pair.step(predecode=True)
    pair.step()


def test_padding_is_never_chosen(twins: Make) -> None:
    pair = twins(tokens=40, top_k=40)
    for session in pair.sessions:
        session.key_mask.read(torch.arange(session.kv_len) >= torch.tensor([[[5]], [[0]]]), 2)
    pair.step(predecode=True)
    run(pair, 12)
    staged = pair.sessions[1].transfer.wait(0)[1]
    assert not ((staged[0] >= 0) & (staged[0] < 5)).any()
    assert (staged[1] == 0).any()


def test_rows_that_guessed_right_keep_what_is_staged(twins: Make) -> None:
    """`on_miss="refetch"`: a pre-decode for some batch rows alone."""
    pair = twins(tokens=60)
    pair.step()
    before = pair.sessions[1].transfer.wait(0)[1].clone()
    missed = torch.tensor([False, True])
    pair.step(predecode=True, told={"missed": missed})
    after = pair.sessions[1].transfer.wait(0)[1]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


@pytest.mark.parametrize("tracked", [True, False])
def test_both_lanes_have_their_share_in_the_selection(twins: Make, tracked: bool) -> None:
    pair = twins(tokens=60, track_hit_rates=tracked)
    for _ in range(6):
        # 0 and 1 are exact in either arithmetic; between them the last bit is rounded otherwise.
        pair.step(told={"shares": torch.tensor([0.0, 1.0])})


@not_served
def test_sessions_that_the_call_does_not_serve(options: dict[str, Any]) -> None:
    small = {"bits": 2, "group_size": 8, "residual_length": 8, "top_k": 4, "lookahead": "token"}
    config = SpecacheConfig(**{**small, **options})
    session = Session(config, (LayerShape(2, 8, 8),), torch.float32, CPU)
    session.store(0, torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8), None)
    assert not session.table.serves
    own = torch.randn(2, 2, 4, 1, 8), torch.randn(2, 2, 2, 1, 8), torch.randn(2, 2, 2, 1, 8)
    with pytest.raises(RuntimeError, match="layer 0 is not to run now"):
        LAYER_STEP(*own, session.state, 0, 0.3, None, None)
    session.close()


def test_a_bias_that_begins_and_ends_is_seen(twins: Make) -> None:
    pair = twins()
    run(pair, 4)
    stored = pair.sessions[0].kv_len
    bias = torch.zeros(2, 2, 1, stored + 2).index_fill(3, torch.tensor([3, 20, stored]), -torch.inf)
    pair.step(told={"biases": {0: bias}})
    run(pair, 2)


@pytest.mark.parametrize("wrong", ["lanes", "batch", "heads", "dim", "dtype"])
def test_what_is_not_the_layers_is_refused(twins: Make, wrong: str) -> None:
    pair = twins()
    query, key, value = pair.own(2)
    key = {
        "lanes": key[:1],
        "batch": key[:, :1],
        "heads": key[:, :, :1],
        "dim": key[..., :4],
        "dtype": key.double(),
    }[wrong]
    kv_len = pair.sessions[1].layers[0].kv_len
    step = DecodeStep(pair.sessions[1], fused_layers=(0,))
    with pytest.raises(RuntimeError, match="is not what layer 0 has"), step.running():
        pair.in_one((query, key, value))
    assert pair.sessions[1].layers[0].kv_len == kv_len


def test_a_trace_shows_the_parts_of_a_layer(twins: Make) -> None:
    pair = twins()
    run(pair, 3)
    own, step = pair.own(2), DecodeStep(pair.sessions[1], fused_layers=(0,))
    with recording() as recorder:
        before = time.perf_counter()
        with step.running():
            pair.in_one(own)
        after = time.perf_counter()
    spans = recorder.finish()
    assert [span.name for span in spans] == ["attention", "select", "append", "prefetch"]
    times = [before, *(time for span in spans for time in (span.start, span.stop)), after]
    assert times == sorted(times)
    assert all(span.args == {"layer": 0} for span in spans)


def test_without_memory_a_step_says_so_and_can_be_repeated(twins: Make) -> None:
    pair = twins()
    run(pair, 3)
    session = pair.sessions[1]
    # Memory that runs out in the middle of the call is the one thing that can't be had for real.
    broken = ctypes.CFUNCTYPE(ctypes.c_int64)(fails)
    table = SessionC.from_address(session.state.data_ptr())
    real = table.attention
    table.attention = ctypes.cast(broken, ctypes.c_void_p).value
    step = DecodeStep(session, fused_layers=(0,))
    with (
        pytest.raises(HostMemoryError, match="no memory for a layer's decode step") as raised,
        step.running(),
    ):
        pair.in_one(pair.own(2))
    assert isinstance(raised.value.__cause__, RuntimeError)
    table.attention = real
    repeat_step(pair)


def test_a_copy_that_fails_leaves_the_step_to_be_repeated(twins: Make) -> None:
    pair = twins()
    run(pair, 3)
    session = pair.sessions[1]

    def step_with_an_empty_host() -> None:
        layer = LayerC.from_address(session.state.data_ptr() + ctypes.sizeof(SessionC))
        with DecodeStep(session, fused_layers=(0,)).running():
            real, layer.inputs.host_length = layer.inputs.host_length, 0
            try:
                pair.in_one(pair.own(2))
            finally:
                layer.inputs.host_length = real

    with pytest.raises(RuntimeError, match="layer 0 wants a token that is not on the host"):
        step_with_an_empty_host()
    assert session.layers[0].kv_len == session.kv_len + 1  # the copy comes last
    repeat_step(pair)


def repeat_step(pair: Twins, steps: int = 4) -> None:
    """Begin the step that failed in one of them anew, and go on."""
    for each in pair.sessions:
        each.rewind(each.kv_len)
        each.transfer.reset(0)
        each.metrics.begin_step()
    pair.step(predecode=True)
    run(pair, steps)


def test_what_the_graph_fails_with_comes_out_as_it_is(twins: Make) -> None:
    pair = twins()
    step = DecodeStep(pair.sessions[1], fused_layers=(0,))
    error = RuntimeError("of the model")
    with pytest.raises(RuntimeError) as raised, step.running():
        raise error
    assert raised.value is error


def test_a_host_that_takes_no_more_leaves_the_step_to_be_repeated(
    twins: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins(tokens=40)
    session = pair.sessions[1]
    cache = session.tiered[0]
    while cache.num_quantized_at(session.kv_len + 1) == cache.num_quantized:
        pair.step()

    def full(*_: Any) -> None:
        raise HostMemoryError("no room")

    step = DecodeStep(session, fused_layers=(0,))
    with monkeypatch.context() as patch:
        patch.setattr(session.host, "append", full)
        with pytest.raises(HostMemoryError, match="no room"), step.running():
            pair.in_one(pair.own(2))
    session.rewind(session.kv_len)
    assert session.layers[0].kv_len == session.kv_len
    repeat_step(pair, 12)


def test_a_step_that_fails_between_two_layers_has_done_the_first(twins: Make) -> None:
    pair = twins()
    run(pair, 3)
    session = pair.sessions[1]
    kv_len, step = session.layers[0].kv_len, DecodeStep(session, fused_layers=(0,))
    with contextlib.suppress(ZeroDivisionError), step.running():
        pair.in_one(pair.own(2))
        raise ZeroDivisionError
    assert session.layers[0].kv_len == kv_len + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_may_be_of_the_models_dtype(twins: Make, dtype: torch.dtype) -> None:
    pair = twins(dtype=torch.bfloat16)
    run(pair, 4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype))


def test_a_layer_is_not_run_twice_in_a_step(twins: Make) -> None:
    pair = twins()
    session, own = pair.sessions[1], pair.own(2)
    with DecodeStep(session, fused_layers=(0,)).running():
        pair.in_one(own)
        with pytest.raises(RuntimeError, match="twice for layer 0"):
            pair.in_one(own)


def test_a_step_within_another_ones_finds_its_own_layers(twins: Make) -> None:
    pairs = [twins(), twins(tokens=44)]
    inner, outer = (pair.sessions[1] for pair in pairs)
    with DecodeStep(outer, fused_layers=(0,)).running(), DecodeStep(inner, fused_layers=(0,)).running():
        pairs[1].in_one(pairs[1].own(2))
        pairs[0].in_one(pairs[0].own(2))
    assert outer.layers[0].kv_len == outer.kv_len + 1
    assert inner.layers[0].kv_len == inner.kv_len + 1


def test_two_threads_run_a_session_each(twins: Make) -> None:
    at_once([partial(run, pair, 30) for pair in (twins(), twins(tokens=44))])


def llama(layers: int = 2, vocab: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, **sizes)).eval()


def generated(model: LlamaForCausalLM, tokens: int, **options: Any) -> Any:
    """Tokens, logits and the cache; compiled where there are options."""
    if options:
        groups = {"group_size": 8, "residual_length": 8, "lowering": "eager"}
        model.compile(backend="specache", options=groups | options)
    asked = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(torch.arange(40)[None], max_new_tokens=tokens, **asked)


@pytest.mark.usefixtures("fresh_dynamo")
def test_layers_that_the_graph_does_not_call_as_one_are_not_told() -> None:
    """The session could be served, but no kernel in C++ reads float64."""
    model = llama(1).double()
    wanted, got = generated(model, 20), generated(model, 20, top_k=64)
    assert torch.equal(wanted.sequences, got.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=1e-9, atol=1e-9)


def storages(session: Session) -> list[StorageWeakRef]:
    rows = [session.transfer.staging(i).rows for i in session.tiered]
    arenas = [cache.tensors.window[0] for cache in session.tiered.values()]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in (*rows, *arenas)]


@pytest.mark.usefixtures("fresh_dynamo")
def test_growth_and_release_leave_no_old_memory() -> None:
    model = llama()
    past = generated(model, 8, top_k=64, lookahead="token").past_key_values
    session = session_of(past)
    assert session.table.serves
    before, quantized = storages(session)[2:], session.tiered[0].num_quantized
    while session.tiered[0].num_quantized == quantized:  # a group more has no room in what the prompt took
        with torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=past)
    assert [ref.expired() for ref in before] == [True, True]
    held = storages(session)
    specache_fx.release(past)
    assert all(ref.expired() for ref in held)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_compiled_model_takes_one_call_and_says_the_same(threads: int) -> None:
    model, fetched, served = llama(1, 4096), [], []  # so large that several threads multiply

    def answer(host: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        done = generated(model, 24, top_k=4, lookahead="token", host=host)
        served.append(session_of(done.past_key_values).table.serves)
        fetched.append(specache_fx.stats(done.past_key_values).prefetched_rows)
        return [done.sequences, *done.logits]

    with num_threads(threads):
        ours, theirs = answer("memory"), answer("disk")
    assert served == [True, False]
    # What both lanes have a share in is rounded otherwise.
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1:], theirs[1:])
    assert fetched[0] == fetched[1] > 0
