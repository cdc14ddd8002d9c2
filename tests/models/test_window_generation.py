"""Beams, drafts, forks and caches of other calls where layers keep a window: as the uncompiled model, or an error."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import SMALL, WINDOW, build, left_padded
from torch import Tensor

import specache_fx
from specache_fx import CacheHandleError
from specache_fx.runtime.session import claims

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {**SMALL, "top_k": 128}
PADDED = left_padded((15, 21))
REPEATS = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])}


def compiled(name: str, bits: int = 16) -> Any:
    model = build(name)
    model.compile(backend="specache", options={**OPTIONS, "bits": bits})
    return model


@cache
def eager(name: str) -> Any:
    return build(name)


def generate(model: Any, prompt: dict[str, Tensor] = PADDED, steps: int = 30, **kwargs: Any) -> Tensor:
    return model.generate(**prompt, max_new_tokens=steps, do_sample=False, **kwargs)


@torch.no_grad()
def prompt(model: Any, tokens: int) -> Any:
    return model(torch.arange(2 * tokens).view(2, tokens) * 7 % 97, use_cache=True).past_key_values


@torch.no_grad()
def decode(model: Any, past: Any, steps: int) -> Tensor:
    tokens = [torch.full((2, 1), 3 + 5 * step) for step in range(steps)]
    return torch.stack([model(token, past_key_values=past, use_cache=True).logits for token in tokens])


@pytest.mark.parametrize(
    ("name", "bits"),
    nightly_unless(
        lambda case: case[1] == 1, [("plain-window", 16), ("plain-window", 1), ("plain-windows", 1)]
    ),
)
def test_beams_equal_eager(name: str, bits: int) -> None:
    """Windows alone too, whose handles stop growing when they are full."""
    expected = generate(eager(name), num_beams=3)
    assert torch.equal(generate(compiled(name, bits), num_beams=3), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["plain-window", "plain-windows"])
def test_drafts_equal_eager(name: str) -> None:
    """Transformers then keeps whole windows, which it crops on both ends itself: those layers are left alone."""
    expected = generate(eager(name), REPEATS, prompt_lookup_num_tokens=3)
    assert torch.equal(generate(compiled(name), REPEATS, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize(
    ("name", "tokens"),
    nightly_unless(
        lambda case: case == ("plain-window", 21),
        [("plain-window", 9), ("plain-window", 21), ("plain-windows", 9)],
    ),
    ids=str,
)
def test_a_plain_cache_is_taken_over(name: str, tokens: int) -> None:
    past, steps = prompt(eager(name), tokens), 12
    expected = decode(eager(name), copy.deepcopy(past), steps)
    torch.testing.assert_close(decode(compiled(name), past, steps), expected, rtol=2e-4, atol=2e-4)
    assert specache_fx.stats(past).kv_len == tokens + steps


def test_full_windows_alone_are_not_taken_over() -> None:
    with pytest.raises(CacheHandleError, match="how many tokens it holds can't be told"):
        decode(compiled("plain-windows"), prompt(eager("plain-windows"), WINDOW + 5), 1)


@pytest.mark.parametrize("tokens", nightly_unless((21).__eq__, [9, 21]))
def test_forks_go_their_own_ways(tokens: int) -> None:
    ours, theirs = compiled("plain-window"), eager("plain-window")
    mine, plain = prompt(ours, tokens), prompt(theirs, tokens)
    twin, plain_twin = copy.deepcopy(mine), copy.deepcopy(plain)
    for past in (twin, plain_twin):
        past.reorder_cache(torch.tensor([1, 1]))
    for a, b in ((twin, plain_twin), (mine, plain), (twin, plain_twin)):
        torch.testing.assert_close(decode(ours, a, 10), decode(theirs, b, 10), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("tokens", [9, 21], ids=["filling", "full"])
def test_cut_handles_are_refused(tokens: int) -> None:
    past = prompt(compiled("plain-window"), tokens)
    whole = [tensor for each in past.layers for tensor in (each.keys, each.values)]
    assert claims.read_claim(whole).kv_len == tokens
    for layer, copied in itertools.product((0, 1), (False, True)):  # the window's, the global one's
        handles = list(whole)
        for i in (2 * layer, 2 * layer + 1):
            handles[i] = handles[i][:, :, 1:].clone() if copied else handles[i][:, :, 1:]
        with pytest.raises(CacheHandleError):
            claims.read_claim(handles)
