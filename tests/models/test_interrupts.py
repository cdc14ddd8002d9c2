"""What a signal's handler raises comes out of a step as it is, wherever it strikes, and the step can be repeated."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.open_sessions import session_of
from support.zoo import TWO_LANES, build, left_padded
from torch import Tensor

import specache_fx
from specache_fx.runtime.transfer import Transfer

IDS = left_padded((12, 12, 12))["input_ids"]
LENGTH = 600


def step(model: Any, past: Any, token: int) -> Tensor:
    with torch._C._InferenceMode(False):  # C++: a `no_grad` could be struck itself, on the way in or out
        torch._C._set_grad_enabled(False)
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
    plain = build("plain", max_position_embeddings=LENGTH)
    compiled = specache_fx.compile(build("plain", max_position_embeddings=LENGTH), **TWO_LANES, bits=16)
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
        except (timer.error, SystemError) as error:
            # Where it strikes between two frames, Dynamo's C code goes on with the exception set.
            if not isinstance(error, timer.error) and not isinstance(error.__cause__, timer.error):
                raise
            struck += 1
            for layer, pair in zip(mine.layers, held, strict=True):  # some may have been exchanged already
                layer.keys, layer.values = pair
            logits = step(compiled, mine, token)
        assert torch.is_grad_enabled()  # no mode of the step's comes back when its traceback is freed
        torch.testing.assert_close(logits, step(plain, theirs, token), rtol=1e-3, atol=1e-3)
    assert struck >= 20


def test_first_step_after_a_crop_can_fail_and_be_repeated(fresh_dynamo: None) -> None:
    model = specache_fx.compile(build("plain"), **TWO_LANES)
    past = prompt(model)
    for token in (3, 4, 5):
        step(model, past, token)
    past.crop(-2)
    with pytest.raises(IndexError):
        step(model, past, 10**6)
    repeated = [step(model, past, token) for token in (7, 8, 9)]
    specache_fx.release(past)
    past = prompt(model)
    step(model, past, 3)
    assert all(
        torch.equal(step(model, past, token), logits)
        for token, logits in zip((7, 8, 9), repeated, strict=True)
    )


def test_a_session_whose_end_was_interrupted_ends_with_the_next_call(
    fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = specache_fx.compile(build("plain"), **TWO_LANES)
    past = prompt(model)
    for token in range(30):
        step(model, past, token)
    session = session_of(past)
    assert session.host is not None
    host, usual, of_session = session.host, Transfer.close, id(session.transfer)

    def struck(self: Transfer) -> None:
        if id(self) != of_session:  # a cache of an earlier test
            return usual(self)
        monkeypatch.setattr(Transfer, "close", usual)
        raise KeyboardInterrupt

    monkeypatch.setattr(Transfer, "close", struck)
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)  # a finalizer's
    gc.collect()  # an earlier test's cache that ended after ours would end ours too
    gc.disable()
    try:
        del past
        gc.collect()
    finally:
        gc.enable()
    assert host.nbytes > 0
    prompt(model)
    assert host.nbytes == 0 and session.host is None
