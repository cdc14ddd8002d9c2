"""Caches of other shapes: sliding windows, chunks and layers that share KV answer as eager does, in both lanes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from architectures import measure
from support.cases import nightly_unless
from support.models import TinyConfig, TinyDecoder
from support.models import generate as decode
from support.zoo import TWO_LANES, WINDOW, WINDOWED_NAMES, build, left_padded
from torch import Tensor

from specache_fx import backend
from specache_fx.backend import Backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 40
SHORT, LONG = (8, 12), (15, 21)  # prompts of a window's tokens at most, and of more
OPTIONS: dict[str, Any] = {**TWO_LANES, "top_k": 128, "strict": True}


def generate(model: Any, lengths: tuple[int, ...], steps: int = STEPS, **kwargs: Any) -> Any:
    return model.generate(
        **left_padded(lengths),
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


@cache
def eager(name: str, lengths: tuple[int, ...]) -> Any:
    return generate(build(name), lengths)


def distance(seen: Tensor, expected: Tensor) -> float:
    return float((seen - expected).abs().max() / expected.abs().max())


def watched(expected: Any, prompt_len: int, monkeypatch: pytest.MonkeyPatch) -> measure.Watch:
    """Has lane 1 fed with the true next token, and its logits compared, step by step."""
    monkeypatch.setattr(measure, "NEW_TOKENS", STEPS)
    tokens, logits = expected.sequences[:, prompt_len:], torch.stack(expected.logits)
    watch = measure.Watch(measure.Eager(tokens, logits, None))
    monkeypatch.setattr(backend, "Decode", watch.decode_class())
    return watch


def cases() -> Iterator[Any]:
    """By day: windows, and chunks, which fill while every pair is prefetched."""
    daily = ("plain-window", "short", 1), ("llama4_text", "short", 1)
    names = "plain-window", *WINDOWED_NAMES
    for name, length, bits in itertools.product(names, ("short", "long"), (1, 16)):
        always = (name, length, bits) in daily
        lengths = SHORT if length == "short" else LONG
        marks = [] if always else [pytest.mark.nightly]
        yield pytest.param(name, lengths, bits, marks=marks, id=f"{name}-{length}-{bits}")


@pytest.mark.parametrize(("name", "lengths", "bits"), list(cases()))
def test_tokens_and_logits_of_both_lanes_equal_eager(
    name: str, lengths: tuple[int, ...], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = eager(name, lengths)
    watch = watched(expected, max(lengths), monkeypatch)
    model = build(name)
    model.compile(backend="specache", options={**OPTIONS, "bits": bits})
    out = generate(model, lengths)
    assert torch.equal(out.sequences, expected.sequences)
    logits = torch.stack(expected.logits)  # [steps, batch, vocabulary]
    assert distance(torch.stack(out.logits), logits) < 1e-4
    if name == "mistral-window":  # nothing is selected where every layer keeps a window: one lane
        return
    ahead = watch.lane_differences
    assert measure.largest(ahead) < 1e-4
    # Lane 1 is void in one step alone: the one that fills the window.
    assert len(ahead) == STEPS - 2 - (max(lengths) < WINDOW)


@pytest.mark.parametrize(
    ("lengths", "late"),
    nightly_unless(lambda case: case[0] == SHORT, [(LONG, 3), (SHORT, WINDOW - max(SHORT) + 3)]),
    ids=["long", "short"],
)
def test_nothing_is_compiled_once_the_window_is_full(lengths: tuple[int, ...], late: int) -> None:
    model, made, tokens = (
        TinyDecoder(TinyConfig(window=WINDOW, window_layers=(0,))),
        list[int](),
        list[Tensor](),
    )

    def observe(name: str, *_: Any) -> None:
        if name in ("dynamo", "verify"):
            made.append(len(tokens))

    forward = torch.compile(
        model, backend=partial(Backend(), options={**OPTIONS, "bits": 16}, observe=observe)
    )

    def counted(ids: Tensor, **given: Any) -> Any:
        logits, past = forward(ids, **given)
        tokens.append(logits)
        return logits, past

    prompt = left_padded(lengths)
    decode(counted, prompt["input_ids"] % 61, 60, prompt["attention_mask"])
    # Dynamo has a graph of its own for the step that fills the window, and one for all that follow.
    assert max(made) <= late


@pytest.mark.parametrize(
    ("windows", "dynamic"),
    [((16,), True), pytest.param((16, 12), None, marks=pytest.mark.slow)],
    ids=["dynamic", "models that differ"],
)
@torch.no_grad()
def test_windows_that_dynamo_takes_for_symbols_are_known(
    windows: tuple[int, ...], dynamic: bool | None
) -> None:
    """A window that is full has one pair less than its layer says: so Dynamo computes one from the other."""
    ids = torch.randint(3, 100, (2, 34), generator=torch.Generator().manual_seed(0))
    for window in windows:
        plain, model = (build("plain-window", sliding_window=window) for _ in range(2))
        model.compile(backend="specache", dynamic=dynamic, options={**OPTIONS, "bits": 16})
        past, start = None, 0
        for piece in (6, 22, 5, 1):
            end = start + piece
            out = model(ids[:, start:end], use_cache=True, past_key_values=past)
            past, start = out.past_key_values, end
            assert distance(out.logits, plain(ids[:, :end]).logits[:, -piece:]) < 1e-4
