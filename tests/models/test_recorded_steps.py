"""Decode steps on the CPU are recorded as C++ calls and replayed: the same bits as Inductor's own code gives."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import nightly_unless
from support.threads import at_once
from support.zoo import SMALL, build
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import specache_fx
from specache_fx.runtime import ops  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.steps import cpu_recorder
from specache_fx.runtime.steps.cpu_recorder import CpuRecorder, generated, share_addresses

OPTIONS = SMALL | {"lowering": "inductor", "bits": 2}
STEPS = 40


def model(name: str = "plain", int8: bool = False, **options: Any) -> Any:
    torch._dynamo.reset()
    made = build(name, 1)
    if int8:
        quantize_(made, Int8WeightOnlyConfig())
    return specache_fx.compile(made, **(OPTIONS | options))


def tokens(count: int) -> torch.Tensor:
    return torch.randint(1, 128, (2, count), generator=torch.Generator().manual_seed(1))


def mask(length: int, padding: int) -> dict[str, torch.Tensor]:
    shown = torch.ones(2, length, dtype=torch.long)
    shown[0, :padding] = 0
    return {"attention_mask": shown} if padding else {}


def decode(
    decoder: nn.Module, cache: Any, steps: int, start: int = 0, padding: int = 0
) -> tuple[torch.Tensor, Any]:
    """Logits of so many tokens that are given, so that nothing hangs on rounding."""
    logits = []
    with torch.no_grad():
        for token in tokens(start + steps)[:, start:].split(1, dim=1):
            shown = mask(cache.get_seq_length() + 1, padding)
            out = decoder(token, past_key_values=cache, use_cache=True, **shown)
            cache = out.past_key_values
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


def history(decoder: nn.Module, padding: int) -> dict[str, Any]:
    """What is seen of steps over groups that fill, a fork and a crop."""
    with torch.no_grad():
        cache = decoder(tokens(21), use_cache=True, **mask(21, padding)).past_key_values
    seen = {}
    seen["steps"], cache = decode(decoder, cache, STEPS, 0, padding)
    replayed = specache_fx.stats(cache).replayed_steps
    fork = copy.deepcopy(cache)
    seen["after a fork"], cache = decode(decoder, cache, 5, 0, padding)
    seen["fork"], fork = decode(decoder, fork, 5, 7, padding)
    cache.crop(-3)
    seen["cropped"], cache = decode(decoder, cache, 5, 0, padding)
    stats = specache_fx.stats(cache)
    counted = (stats.steps, stats.exact_hit_rate, stats.prefetched_bytes)
    return seen | {"counted": counted, "replayed": replayed + stats.replayed_steps}


@pytest.mark.parametrize(
    ("options", "padding"),
    nightly_unless(lambda case: case[0] == {}, [({}, 0), ({"int8": True}, 0), ({"on_miss": "refetch"}, 3)]),
    ids=["recover", "weights in int8", "refetch, padded"],
)
def test_replayed_steps_give_the_bits_of_those_that_ran(options: dict[str, Any], padding: int) -> None:
    replayed, ran = (history(model("llama", **options, replay=replay), padding) for replay in (True, False))
    assert replayed.pop("replayed") > STEPS and ran.pop("replayed") == 0
    for name, value in ran.items():
        same = torch.equal(value, replayed[name]) if torch.is_tensor(value) else value == replayed[name]
        assert same, name


def test_a_weight_elsewhere_and_other_threads() -> None:
    decoder = model()
    with torch.no_grad():
        cache = decoder(tokens(21), use_cache=True).past_key_values
    _, cache = decode(decoder, cache, 6)
    was = specache_fx.stats(cache).replayed_steps
    projection = decoder.layers[0].down_proj
    projection.weight.data = projection.weight.data * 2
    changed, cache = decode(decoder, cache, 6)
    assert specache_fx.stats(cache).replayed_steps == was + 5  # one ran, one was recorded
    other = model(replay=False)
    with torch.no_grad():
        plain = other(tokens(21), use_cache=True).past_key_values
    _, plain = decode(other, plain, 6)
    other.layers[0].down_proj.weight.data *= 2
    assert torch.equal(changed, decode(other, plain, 6)[0])

    def run() -> torch.Tensor:
        with torch.no_grad():
            own = decoder(tokens(21), use_cache=True).past_key_values
        return decode(decoder, own, STEPS)[0]

    one, two, three = at_once([run] * 3)
    assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["expanded", "with gaps"])
def test_inputs_that_are_expanded_or_have_gaps(kind: str) -> None:
    logits = []
    for replay in (True, False):
        decoder = model(policy="kivi", replay=replay)
        with torch.no_grad():
            cache = decoder(tokens(21), use_cache=True).past_key_values
            wide = tokens(40)
            rows = wide[:1].expand(2, 40) if kind == "expanded" else wide
            for i in range(12):
                out = decoder(rows[:, i : i + 1], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits)
        replayed = specache_fx.stats(cache).replayed_steps
        assert (replayed > 0) == replay  # ids are copied to lie one behind the other
    assert all(map(torch.equal, logits[:12], logits[12:]))


def test_a_failure_to_record_leaves_the_step(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    x = torch.randn(3, 40)
    lowered = compiled(lambda x: (torch.tanh(x) + 1,), x)
    (function,) = generated(lowered)
    before = dict(function.__globals__)

    def fail(*_: Any) -> Any:
        raise OSError("not now")

    monkeypatch.setattr(cpu_recorder, "share_addresses", fail)
    results, replay = CpuRecorder().record(lambda: lowered(x), lowered)
    assert replay is None and torch.equal(results[0], lowered(x)[0]) and "recording failed" in caplog.text
    monkeypatch.setattr(cpu_recorder, "_address_of", fail)
    results, replay = CpuRecorder().record(lambda: lowered(x), lowered)
    assert replay is None and torch.equal(results[0], lowered(x)[0])
    assert {name: value for name, value in function.__globals__.items() if name in before} == before


def compiled(function: Any, *inputs: torch.Tensor) -> Any:
    """Of Inductor's."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    return compile_fx(make_fx(function)(*inputs), list(inputs))


def test_kernels_are_replayed_on_what_the_inputs_hold_then() -> None:
    x, weight = torch.randn(3, 40), torch.randn(24, 40)

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = torch.ops.specache.products(torch.tanh(x), weight, weight + 1)
        return torch.softmax(first * second, -1).amax(0), first + 1

    lowered = compiled(function, x, weight)
    results, replay = CpuRecorder().record(lambda: lowered(x, weight), lowered)
    assert replay is not None
    for factor in (-1, 0.5):
        x.mul_(factor)
        replay()
        for result, expected in zip(results, lowered(x, weight), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (torch.mm(x, x.t()).exp(),), "`extern_kernels`"),
        (lambda x: (torch.bernoulli(x.sigmoid()),), "`aten`"),
        (lambda x: (torch.sort(x).values + 1,), "`aten`"),
    ],
    ids=["product", "random", "sort"],
)
def test_what_is_not_known_is_not_recorded(function: Any, reason: str, caplog: Any) -> None:
    x = torch.randn(3, 40)
    lowered = compiled(function, x)
    with caplog.at_level("INFO", logger="specache_fx"):
        results, replay = CpuRecorder().record(lambda: lowered(x), lowered)
    assert replay is None and reason in caplog.text
    assert results[0].shape == lowered(x)[0].shape


def test_nothing_is_left_of_a_recording() -> None:
    x = torch.randn(3, 40)
    lowered = compiled(lambda x: (torch.tanh(x) + 1,), x)
    (function,) = generated(lowered)
    before = dict(function.__globals__)
    results, replay = CpuRecorder().record(lambda: lowered(x), lowered)
    assert {name: value for name, value in function.__globals__.items() if name in before} == before
    tape = weakref.ref(replay.__self__)  # type: ignore[union-attr]
    del replay, results
    gc.collect()
    assert tape() is None
    assert CpuRecorder().record(lambda: (x,), lowered) == ((x,), None)  # something else ran
    with pytest.raises(ZeroDivisionError):
        CpuRecorder().record(lambda: 1 // 0, lowered)  # type: ignore[arg-type]
    assert {name: value for name, value in function.__globals__.items() if name in before} == before
    assert CpuRecorder().record(lambda: (1,), lambda: (1,)) == ((1,), None)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(1, 5000)), max_size=40))
def test_addresses_are_shared_by_what_is_not_alive_at_once(drawn: list[tuple[int, int, int]]) -> None:
    lives = [(first, first + steps, nbytes) for first, steps, nbytes in drawn]
    offsets, end = share_addresses(lives)
    for i, (first, last, nbytes) in enumerate(lives):
        assert offsets[i] % 64 == 0 and offsets[i] + nbytes <= end
        for j in range(i):
            apart = lives[j][1] < first or last < lives[j][0]
            assert apart or offsets[j] + lives[j][2] <= offsets[i] or offsets[i] + nbytes <= offsets[j]
    assert end <= sum(-(-nbytes // 64) * 64 for *_, nbytes in lives)
