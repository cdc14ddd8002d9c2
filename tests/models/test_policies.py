"""What the options of policy keep on the device: bytes as planned, answers as the uncompiled model's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.open_sessions import session_of
from support.zoo import SMALL, build, left_padded
from torch import Tensor

import specache_fx
from specache_fx.runtime.layers.layer_cache import LayerCache

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LENGTHS = (9, 21)


def generate(model: Any, steps: int = 30, **kwargs: Any) -> Any:
    return model.generate(
        **left_padded(LENGTHS), max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, **kwargs
    )


@cache
def eager(name: str, layers: int | None = None) -> Tensor:
    return generate(build(name, layers)).sequences


def ours(name: str, prefill_chunk_size: int | None = None, layers: int | None = None, **options: Any) -> Any:
    model = specache_fx.compile(build(name, layers), **{**SMALL, "strict": True, **options})
    return generate(model, prefill_chunk_size=prefill_chunk_size)


# Resident layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [1, 9])
def test_resident_layers_are_whole_on_the_device_and_the_others_are_not(
    resident: int, caplog: pytest.LogCaptureFixture
) -> None:
    out = ours("plain", bits=1, top_k=128, resident_layers=resident, lookahead="token")
    assert torch.equal(out.sequences, eager("plain"))
    assert ("resident_layers=9 keeps each of the 2 layers" in caplog.text) == (resident == 9)
    stats = specache_fx.stats(out.past_key_values)
    assert (stats.host_bytes > 0) == (stats.prefetched_bytes > 0) == (resident == 1)
    assert (stats.topk_hit_rate is None) == (stats.exact_hit_rate is None) == (resident == 9)
    if resident == 1:
        assert stats.topk_hit_rate == 1  # of the other layer: all of it was fetched
    else:
        # 21 tokens, then room for 256 more: 277 rows for 50 tokens. And a padding mask.
        assert stats.device_bytes == stats.full_bytes // 50 * 277 + 2 * 49


@pytest.mark.parametrize("name", nightly_unless("plain-window".__eq__, ["gemma3n_text", "plain-window"]))
def test_resident_layers_are_counted_without_windows_and_shared_ones_read_them(name: str) -> None:
    out = ours(name, bits=1, top_k=1, resident_layers=1)  # of the one layer that has all tokens
    assert torch.equal(out.sequences, eager(name))
    stats = specache_fx.stats(out.past_key_values)
    assert stats.host_bytes == stats.prefetched_bytes == 0


# Sink tokens ------------------------------------------------------------------------------------------------------


def sinks_of(past: Any) -> list[list[list[int]]]:
    """The tokens whose rows each layer holds, by layer and sequence."""
    session = session_of(past)
    layers = [layer for layer in session.layers if isinstance(layer, LayerCache) and layer.sinks is not None]
    return [layer.sinks.indices.tolist() for layer in layers if layer.sinks is not None]


@pytest.mark.parametrize("policy", nightly_unless(lambda policy: policy == "specache", ["specache", "kivi"]))
def test_sinks_are_not_put_on_padding_when_a_chunk_is_nothing_else(policy: str) -> None:
    exact = {"specache": {"bits": 1, "lookahead": "token", "top_k": 128}, "kivi": {"bits": 8}}[policy]
    out = ours("plain", policy=policy, sink_tokens=3, prefill_chunk_size=6, layers=1, **exact)
    if policy == "specache":
        assert torch.equal(out.sequences, eager("plain", 1))
    assert sinks_of(out.past_key_values) == [[[12, 13, 14], [0, 1, 2]]]


@pytest.mark.parametrize("policy", nightly_unless("specache".__eq__, ["specache", "kivi"]))
@pytest.mark.parametrize("tokens", nightly_unless((4).__eq__, [1, 4]))
@torch.no_grad()
def test_sinks_of_a_cache_that_is_taken_over_are_its_first_real_tokens(policy: str, tokens: int) -> None:
    model = build("plain")
    inputs = left_padded(LENGTHS)
    past = model(**inputs, use_cache=True).past_key_values
    specache_fx.compile(model, **{**SMALL, "policy": policy, "bits": 1, "sink_tokens": 3})
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, tokens), value=1)
    ids = torch.arange(2 * tokens).view(2, tokens)
    past = model(ids, attention_mask=mask, past_key_values=past, use_cache=True).past_key_values
    # Of 22 or 25 tokens 8 or 16 are quantised.
    row = [12, 13, 14] if tokens == 4 else [-1, -1, -1]
    assert sinks_of(past) == [[row, [0, 1, 2]]] * 2


# KCache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 2])
def test_kcache_that_fetches_every_value_equals_the_uncompiled_model(beams: int) -> None:
    plain, model = build("plain"), build("plain")
    specache_fx.compile(
        model, **SMALL | {"policy": "kcache", "top_k": 128, "resident_layers": 1, "strict": True}
    )
    expected, out = (generate(each, num_beams=beams) for each in (plain, model))
    assert torch.equal(out.sequences, expected.sequences)
    if beams == 1:  # else the cache that comes back is a copy
        stats = specache_fx.stats(out.past_key_values)
        assert stats.exact_hit_rate is stats.topk_hit_rate is None
        assert stats.prefetched_bytes == stats.prefetched_rows * 16 * 4 > 0  # values of 16 channels, no keys
        assert (
            stats.host_bytes == 2 * 2 * 64 * 16 * 4
        )  # of one layer's 2 sequences and 2 heads: room for 64 values
