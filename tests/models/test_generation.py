"""Ways of generating: each equals the uncompiled model (bits=16)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.ways import (
    ALONE,
    EXACT,
    PADDED,
    WAYS,
    arguments,
    crop_and_go_on,
    generate,
    own_loop,
    step,
)
from support.zoo import SMALL, build, left_padded
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import specache_fx
from specache_fx import CacheHandleError

anew = pytest.mark.usefixtures("fresh_dynamo")
# What is tested are the calls: Dynamo traces a layer in half the time of two.
LAYERS = 1


def compiled(name: str = "plain", /, **options: Any) -> nn.Module:
    return specache_fx.compile(build(name, LAYERS), **{**SMALL, "bits": 16, **options})


@cache
def shared(name: str = "plain", prompts: str = "auto") -> nn.Module:
    """Compiled once for tests that leave its graphs as they are, one after another."""
    return compiled(name, prompts=prompts)


@cache
def eager(name: str = "plain") -> nn.Module:
    return build(name, LAYERS)


class Listener(BaseStreamer):
    """Keeps what is streamed; calls `then` after every token."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.pieces: list[Tensor] = []
        self.ended = False
        self.then = then

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.reshape(value.shape[0], -1))
        self.then()

    def end(self) -> None:
        self.ended = True


# Equal to eager -----------------------------------------------------------------------------------------------------


# Each of these calls the model as the others don't; beams are with windows (`test_window_generation.py`).
_DAILY = ("prefill_chunk_size", "prompt_lookup", "assistant_model")


# An early exit needs two layers: `test_ways.py` has it.
@pytest.mark.parametrize(
    ("name", "way", "prompts"),
    nightly_unless(
        lambda case: case[0] == "plain" and case[1] in _DAILY,
        itertools.product(
            ["plain", "gpt2"], [way for way in WAYS if way != "early_exit"], ["auto", "traced"]
        ),
    ),
)
def test_way_equals_eager(name: str, way: str, prompts: str) -> None:
    prompt, kwargs = arguments(way, name)
    expected = generate(eager(name), prompt, **kwargs)
    assert torch.equal(generate(shared(name, prompts), prompt, **kwargs), expected)


# Several generations ------------------------------------------------------------------------------------------------


def test_generations_of_other_sizes_on_one_model() -> None:
    model = shared()
    for batch, width in ((3, 30), (1, 9)):
        prompt = left_padded(tuple(width - 2 * row for row in range(batch)), seed=batch)
        out: Any = generate(model, prompt, return_dict_in_generate=True)
        assert torch.equal(out.sequences, generate(eager(), prompt))
        assert specache_fx.stats(out.past_key_values).steps == 29


def test_generate_within_generate() -> None:
    model, inner = shared(), []
    outer = Listener(lambda: inner.append(generate(model, ALONE, new_tokens=12)))
    assert torch.equal(generate(model, streamer=outer, new_tokens=20), generate(eager(), new_tokens=20))
    expected = generate(eager(), ALONE, new_tokens=12)
    assert len(inner) == 21 and all(torch.equal(tokens, expected) for tokens in inner)


@pytest.mark.parametrize("removed", [1, 7, 19])
def test_continuing_a_cropped_cache(removed: int) -> None:
    """Into the window, over its edge, and deep into what was quantised."""
    torch.testing.assert_close(crop_and_go_on(shared(), removed), crop_and_go_on(eager(), removed), **EXACT)


def test_extending_a_cropped_cache() -> None:
    def crop_and_extend(model: nn.Module) -> Tensor:
        past = generate(model, ALONE, new_tokens=30, return_dict_in_generate=True).past_key_values
        past.crop(-9)
        return own_loop(model, torch.tensor([[77, 3, 4, 77, 12]]), 12, past)

    torch.testing.assert_close(crop_and_extend(shared()), crop_and_extend(eager()), **EXACT)


# How the model is called --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", nightly_unless("plain".__eq__, ["plain", "gpt2", "qwen3"]))
def test_own_loop_without_positions_or_mask(name: str) -> None:
    prompt = PADDED["input_ids"][1:]
    torch.testing.assert_close(own_loop(shared(name), prompt, 25), own_loop(eager(name), prompt, 25), **EXACT)


def test_streamer_gets_every_token() -> None:
    listener = Listener()
    tokens = generate(shared(), streamer=listener)
    assert listener.ended and torch.equal(torch.cat(listener.pieces, dim=1), tokens)


def test_inference_mode_and_no_grad_by_turns() -> None:
    prompt = PADDED["input_ids"][1:]
    expected, model = own_loop(eager(), prompt, 25), shared()
    token, past = prompt, None
    for i in range(25):
        mode = (torch.inference_mode, torch.no_grad)[(i // 5) % 2]
        with mode():
            out = model(token, past_key_values=past, use_cache=True)
        past, token = out.past_key_values, out.logits[:, -1].argmax(-1)[:, None]
        torch.testing.assert_close(out.logits[:, -1], expected[i], **EXACT)


def test_hidden_states_are_those_of_the_output_token() -> None:
    kwargs = {"output_hidden_states": True, "return_dict_in_generate": True, "new_tokens": 20}
    ours, plain = generate(shared("llama"), **kwargs), generate(eager("llama"), **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    for our_step, plain_step in zip(ours.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(our_step, plain_step, **EXACT)


def test_logits_to_keep() -> None:
    prompt, kwargs = PADDED["input_ids"][1:], {"logits_to_keep": 1}
    torch.testing.assert_close(
        own_loop(shared("llama"), prompt, 12, **kwargs),
        own_loop(eager("llama"), prompt, 12, **kwargs),
        **EXACT,
    )


@anew
def test_gradients_leave_the_model_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = compiled("llama").train(), build("llama", LAYERS).train()
    with caplog.at_level(logging.WARNING, logger="specache_fx"):
        ours = model(**PADDED, labels=PADDED["input_ids"])
    assert "gradients are enabled" in caplog.text and "torch.no_grad()" in caplog.text
    expected = plain(**PADDED, labels=PADDED["input_ids"])
    torch.testing.assert_close(ours.logits, expected.logits, **EXACT)
    ours.loss.backward()
    expected.loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
    with pytest.raises(CacheHandleError, match="has no KV cache of specache"):
        specache_fx.stats(ours.past_key_values)
    # Without gradients the cache is taken over.
    mask = torch.nn.functional.pad(PADDED["attention_mask"], (0, 1), value=1)
    found, wanted = (
        step(net.eval(), torch.tensor([[5]] * 3), out.past_key_values, attention_mask=mask)[0]
        for net, out in ((model, ours), (plain, expected))
    )
    torch.testing.assert_close(found, wanted, **EXACT)


@anew
@pytest.mark.parametrize("lookahead", nightly_unless(lambda name: name == "token", ["token", "query"]))
def test_generation_up_to_the_last_learned_position(lookahead: str) -> None:
    """At the end the speculative lane asks for a position that the table does not have."""
    model = build("gpt2", LAYERS, n_positions=48)
    new_tokens = 48 - PADDED["input_ids"].shape[1] + 1
    expected = generate(model, new_tokens=new_tokens)
    model.compile(backend="specache", options={**SMALL, "bits": 16, "lookahead": lookahead})
    assert torch.equal(generate(model, new_tokens=new_tokens), expected)
    assert expected.shape[1] == 49
