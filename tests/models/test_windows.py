"""Caches of other shapes: sliding windows, chunks and layers that share KV answer as eager does, in both lanes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.models import TinyConfig, TinyDecoder
from support.models import generate as decode
from support.zoo import SMALL, WINDOW, WINDOWED_NAMES, build, left_padded
from torch import Tensor

from specache_fx import decode_runner
from specache_fx.backend import Backend
from specache_fx.runtime.session import Session

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 40
SHORT, LONG = (8, 12), (15, 21)  # prompts of a window's tokens at most, and of more
OPTIONS: dict[str, Any] = {**SMALL, "top_k": 128, "strict": True}


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


@dataclass
class Lanes:
    """Feeds lane 1 with the true next token and keeps its logits, step by step."""

    truth: Tensor  # [batch, tokens]
    kv_len: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step, lower = decode_runner.Decode._step, decode_runner.lower_static

        def forced(
            runner: decode_runner.Decode, session: Session, args: Any, biases: Any, ahead: int, **more: Any
        ) -> Any:
            if ahead and runner.lanes > 1 and session.kv_len + 1 < self.truth.shape[1]:
                session.speculative_token = self.truth[:, session.kv_len + 1, None]
            out = step(runner, session, args, biases, ahead, **more)
            if ahead and out[1] and runner.lanes > 1:
                self.kv_len.append(session.kv_len)
                self.logits.append(self.last)
            return out

        def kept(*args: Any, **more: Any) -> Any:
            compiled = lower(*args, **more)

            def run(*inputs: Tensor) -> Any:
                results = compiled(*inputs)
                self.last = next(
                    result for result in results if result.shape[-1] == 128 and result.dim() == 4
                )[1]
                return results

            return run

        monkeypatch.setattr(decode_runner.Decode, "_step", forced)
        if self.truth.numel():
            monkeypatch.setattr(decode_runner, "lower_static", kept)


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
    lanes = Lanes(expected.sequences)
    if name != "mistral-window":
        lanes.watch(monkeypatch)
    model = build(name)
    model.compile(backend="specache", options={**OPTIONS, "bits": bits})
    out = generate(model, lengths)
    assert torch.equal(out.sequences, expected.sequences)
    logits = torch.stack(expected.logits)  # [steps, batch, vocabulary]
    assert distance(torch.stack(out.logits), logits) < 1e-4
    if name == "mistral-window":  # nothing is selected where every layer keeps a window: one lane
        return
    prompt_len = max(lengths)
    ahead = [
        distance(seen[:, 0], logits[kv_len - prompt_len + 2])
        for kv_len, seen in zip(lanes.kv_len, lanes.logits, strict=True)
        if kv_len - prompt_len + 2 < STEPS
    ]
    assert max(ahead) < 1e-4
    # Lane 1 is void in one step alone: the one that fills the window.
    assert len(ahead) == STEPS - 2 - (prompt_len < WINDOW)


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
