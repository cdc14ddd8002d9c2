"""Loops written by hand: masks that come and go from step to step, and caches whose prompt ran uncompiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.models import KVPairs, TinyConfig, TinyDecoder
from support.zoo import SMALL, TWO_LANES, build
from torch import Tensor

import specache_fx
from specache_fx.runtime.tracing import Recorder, recording

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CLOSE = {"rtol": 2e-4, "atol": 2e-4}
EXACT = {**SMALL, "bits": 16, "strict": True}
LOSSY = {**TWO_LANES, "bits": 1, "top_k": 4, "track_hit_rates": "steps"}
LENGTH = 21
CONFIGS = {
    "plain": TinyConfig(num_layers=1),
    "alibi": TinyConfig(num_layers=1, alibi=True),
    "local": TinyConfig(local_reach=6, local_layers=(1,)),
    "latent": TinyConfig(latent_dim=12, num_kv_heads=1, head_dim=16),
    "window": TinyConfig(window=8, window_layers=(0,)),
    "learned": TinyConfig(positions="learned", repeat_kv="expand", norm="layer"),
}


def prompt(batch: int) -> Tensor:
    return torch.randint(61, (batch, LENGTH), generator=torch.Generator().manual_seed(batch))


def padding(batch: int, dtype: torch.dtype) -> Tensor:
    """On the left, where there are rows to differ."""
    return (torch.arange(LENGTH) >= torch.tensor([0, 7, 3])[:batch, None]).to(dtype)


@torch.no_grad()
def decode(model: Any, ids: Tensor, masks: str, padded: Tensor) -> Tensor:
    """Greedy logits; `masks` says of each call whether a mask is passed ("1") or none ("0")."""
    past: KVPairs | None = None
    found = []
    for given in masks:
        mask = padded if given == "1" else None
        logits, past = model(ids, past=past, attention_mask=mask)
        found.append(logits[:, -1])
        ids = logits[:, -1].argmax(-1)[:, None]
        padded = torch.cat((padded, padded.new_ones(len(padded), 1)), dim=1)
    return torch.stack(found, dim=1)


COMES, GOES = "0" * 6 + "1" * 12, "1" * 6 + "0" * 12
AT_ONCE, NO_MORE = "0" + "1" * 12, "1" + "0" * 12


@pytest.mark.parametrize(
    ("name", "batch", "masks"),
    nightly_unless(
        lambda case: case[0] == "plain",
        [
            ("plain", 1, COMES),
            ("plain", 3, GOES),
            ("alibi", 3, AT_ONCE),
            ("local", 1, COMES),
            ("latent", 3, COMES),
            ("window", 1, NO_MORE),
            ("window", 3, COMES),
            ("learned", 3, AT_ONCE),
        ],
    ),
)
def test_a_mask_that_comes_or_goes_within_a_generation_is_followed(name: str, batch: int, masks: str) -> None:
    model = TinyDecoder(CONFIGS[name])
    compiled = torch.compile(model, backend="specache", options=EXACT)
    padded = padding(batch, torch.int64)
    ours, truth = (decode(each, prompt(batch), masks, padded) for each in (compiled, model))
    torch.testing.assert_close(ours, truth, **CLOSE)
    assert torch.equal(ours.argmax(-1), truth.argmax(-1))


@pytest.mark.parametrize(
    ("masks", "dtype"),
    nightly_unless(
        lambda case: case[1] == torch.int64,
        [
            (("0" * 14, "1" * 14), torch.int64),
            (("1" * 14, "0" * 14), torch.bool),
            (("0" * 14, "0" + "1" * 13), torch.float32),
        ],
    ),
)
def test_a_generation_with_a_mask_follows_one_without(masks: tuple[str, str], dtype: torch.dtype) -> None:
    model = TinyDecoder(CONFIGS["plain"])
    compiled = torch.compile(model, backend="specache", options=EXACT)
    for turn in masks:
        ours, truth = (decode(each, prompt(1), turn, padding(1, dtype)) for each in (compiled, model))
        torch.testing.assert_close(ours, truth, **CLOSE)


def test_a_mask_whose_length_is_said_to_be_constant_is_followed_all_the_same() -> None:
    model = TinyDecoder(CONFIGS["plain"])
    compiled = torch.compile(model, backend="specache", options=EXACT)
    ids, past, found = prompt(1), None, []
    with torch.no_grad():
        for step in range(10):
            mask = torch.ones(1, LENGTH + step, dtype=torch.int64) if step in (4, 5) else None
            if mask is not None:
                torch._dynamo.mark_static(mask, 1)
            logits, past = compiled(ids, past=past, attention_mask=mask)
            found.append(logits[:, -1])
            ids = logits[:, -1].argmax(-1)[:, None]
    torch.testing.assert_close(
        torch.stack(found, dim=1), decode(model, prompt(1), "0" * 10, padding(1, torch.bool))
    )


def transformers_steps(model: Any, ids: Tensor, past: Any, masked: bool, count: int) -> tuple[Tensor, Any]:
    """Greedy logits without position_ids, and the cache."""
    found = []
    with torch.no_grad():
        for _ in range(count):
            length = ids.shape[1] + (0 if past is None else past.get_seq_length())
            mask = torch.ones(1, length, dtype=torch.int64) if masked else None
            out = model(ids, past_key_values=past, attention_mask=mask, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1].argmax(-1)[:, None]
            found.append(out.logits[:, -1])
    return torch.stack(found, dim=1), past


@pytest.mark.parametrize(
    ("name", "attention"),
    nightly_unless(
        lambda case: case == ("llama", "eager"),
        [("llama", "sdpa"), ("gemma3_text", "sdpa"), ("llama", "eager"), ("gpt2", "eager")],
    ),
)
def test_a_mask_that_comes_later_is_followed_in_a_model_of_transformers(
    name: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = 2 if name == "gemma3_text" else 1
    plain, compiled = build(name, layers), build(name, layers)
    for model in (plain, compiled):
        model.set_attn_implementation(attention)
    compiled.compile(backend="specache", options=EXACT)
    found = []
    for model in (compiled, plain):
        first, past = transformers_steps(model, prompt(1) + 3, None, False, 5)
        then, _ = transformers_steps(model, first[:, -1].argmax(-1)[:, None], past, True, 8)
        found.append(torch.cat((first, then), dim=1))
    torch.testing.assert_close(*found, **CLOSE)
    assert "left alone" not in caplog.text


@torch.no_grad()
def forced_steps(model: Any, past: KVPairs) -> tuple[Tensor, KVPairs, list[str]]:
    """Logits of ten steps, the cache, and what was run."""
    found = []
    with recording() as recorder:
        for token in torch.randint(61, (10, 3, 1), generator=torch.Generator().manual_seed(7)):
            logits, past = model(token, past=past)
            found.append(logits)
    return torch.cat(found, dim=1), past, runs_of(recorder)


def runs_of(recorder: Recorder) -> list[str]:
    return [span.name for span in recorder.finish() if span.name in ("pre-decode", "decode step")]


@torch.no_grad()
def test_a_cache_that_is_taken_over_is_speculated_on_as_one_of_our_own() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    found = []
    for taken_over in (False, True):
        torch._dynamo.reset()
        # What is taken over has no tokens, of which "recover" would guess.
        options = {**LOSSY, "on_miss": "keep"}
        compiled: Any = torch.compile(model, backend="specache", options=options)
        logits, past, names = forced_steps(compiled, (model if taken_over else compiled)(prompt(3))[1])
        assert names == ["pre-decode", *["decode step"] * 10]
        found.append((logits, specache_fx.stats(past).hit_series))
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    # The guesses too: those of the first step were made at the next token's position.
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize("name", nightly_unless("plain".__eq__, ["plain", "llama", "gpt2"]))
def test_a_dynamic_cache_that_is_taken_over_is_pre_decoded_once(name: str) -> None:
    model = build(name, 1)
    first, past = transformers_steps(model, prompt(1) + 3, None, False, 1)
    model.compile(backend="specache", options=LOSSY)
    with recording() as recorder:
        transformers_steps(model, first[:, -1].argmax(-1)[:, None], past, False, 4)
    assert runs_of(recorder) == ["pre-decode", *["decode step"] * 4]
