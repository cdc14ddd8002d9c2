"""What a signal's handler raises comes out of a step as it is, wherever it strikes, and the step can be repeated."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.zoo import SMALL, build, left_padded
from torch import Tensor

import specache_fx

IDS = left_padded((12, 12, 12))["input_ids"]
LENGTH = 600


@torch.no_grad()
def step(model: Any, past: Any, token: int) -> Tensor:
    return model(torch.full((3, 1), token), past_key_values=past, use_cache=True).logits


@torch.no_grad()
def prompt(model: Any) -> Any:
    return model(IDS, use_cache=True).past_key_values


class Timer:
    """A timer of the system's, whose signal raises `error` while it is armed: once."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.armed = error, False

    def start(self, seconds: float) -> None:
        """Signal every so many seconds."""
        signal.setitimer(signal.ITIMER_REAL, 1e-3, seconds)

    def strike(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise self.error("struck")


@pytest.fixture(params=[KeyboardInterrupt, TimeoutError])
def timer(request: pytest.FixtureRequest) -> Iterator[Timer]:
    timer = Timer(request.param)
    before = signal.signal(signal.SIGALRM, timer.strike)
    yield timer
    timer.armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_comes_out_of_a_step_as_it_is(timer: Timer, fresh_dynamo: None) -> None:
    plain = build("llama", max_position_embeddings=LENGTH)
    compiled = specache_fx.compile(build("llama", max_position_embeddings=LENGTH), **SMALL, bits=16)
    mine, theirs = prompt(compiled), prompt(plain)
    step(compiled, mine, 3)
    step(plain, theirs, 3)
    timer.start(7e-4)  # anywhere in a step of a few milliseconds
    struck = 0
    while struck < 30 and mine.get_seq_length() < LENGTH:
        token = struck % 100
        held = [(layer.keys, layer.values) for layer in mine.layers]
        try:
            timer.armed = True
            logits = step(compiled, mine, token)
            timer.armed = False
        except timer.error:
            struck += 1
            for layer, pair in zip(mine.layers, held, strict=True):  # some may have been exchanged already
                layer.keys, layer.values = pair
            logits = step(compiled, mine, token)
        torch.testing.assert_close(logits, step(plain, theirs, token), rtol=1e-3, atol=1e-3)
    assert struck >= 20
