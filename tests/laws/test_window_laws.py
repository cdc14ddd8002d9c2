"""Layers with a window in a module of our own: the laws over random windows and lengths, crop, errors, sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import strategies
from support.cases import examples, nightly_unless
from support.compiled import EXACT, assert_oracles, assert_plain, compiled, forced_tokens
from support.models import TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from torch import Tensor

import specache_fx
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.layers.layout import Arena, LayerShape
from specache_fx.runtime.layers.window_cache import WindowCache, buffer_rows
from specache_fx.runtime.quant import make_quantizer

CONFIG = SpecacheConfig(bits=16, group_size=8, residual_length=8, top_k=8)


@st.composite
def windowed(draw: st.DrawFn) -> strategies.Prompt:
    """A prompt for a decoder of two layers, one of which or both keep a window."""
    prompt = draw(strategies.prompts(min_len=2, max_len=30))
    layers = draw(st.sampled_from(((0,), (1,), (0, 1))))
    config = replace(prompt.model.config, num_layers=2, window=draw(st.integers(2, 24)), window_layers=layers)
    return strategies.Prompt(TinyDecoder(config), prompt.input_ids, prompt.attention_mask, prompt.untraced)


@settings(max_examples=examples(2))
@given(st.data())
def test_windows_equal_the_dense_oracle(data: st.DataObject) -> None:
    prompt = data.draw(windowed())
    config = data.draw(strategies.configs(bits=data.draw(strategies.low_bits)))
    forced = forced_tokens(prompt, 14, data.draw(strategies.seeds))
    truth, _, session = assert_oracles(prompt, config, 14, forced)
    assert session.metrics.steps == 13
    if config.num_lanes == 2 and session.has_tiered_layers:
        assert session.metrics.hits.token_hits == truth.exact_hits.hits
        assert session.metrics.hits.token_checks == truth.exact_hits.total


@pytest.mark.parametrize(
    ("lookahead", "window", "layer"),
    nightly_unless(
        lambda case: case in (("token", 9, 1), ("query", 5, 0)),
        [("token", 9, 1), ("token", 20, 0), ("token", 4, 0), ("query", 5, 0), ("none", 6, 0)],
    ),
)
def test_window_of_one_layer_equals_the_dense_oracle(lookahead: Any, window: int, layer: int) -> None:
    # Window 9: the past's length came in as an integer too, and lane 1 was given one more than the window has.
    model = TinyDecoder(TinyConfig(num_layers=2, window=window, window_layers=(layer,)))
    config = SpecacheConfig(bits=1, group_size=4, residual_length=2, top_k=3, lookahead=lookahead)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, :3] = False
    truth, _, session = assert_oracles(strategies.Prompt(model, ids(14), mask), config, 14, ids(13, 1))
    assert session.metrics.hits.token_checks == truth.exact_hits.total
    if lookahead != "none":
        assert session.metrics.hits.topk_hits == truth.topk_hits.hits


@settings(max_examples=examples(1))
@given(windowed())
def test_windows_equal_plain_decoding(prompt: strategies.Prompt) -> None:
    assert_plain(prompt, CONFIG, 30)


@given(
    window=st.integers(2, 40),
    sizes=st.lists(st.sampled_from((1, 1, 1, 2, 5, 30)), min_size=1, max_size=20),
    seed=strategies.seeds,
)
def test_window_cache_holds_the_newest_pairs_and_takes_the_last_token_back(
    window: int, sizes: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    quantizer = make_quantizer(SpecacheConfig(bits=2))
    arena = Arena(quantizer, LayerShape(3, 4, 5, window), 2, torch.float32, torch.device("cpu"))
    cache, key, value = WindowCache(arena, window), torch.empty(2, 3, 0, 4), torch.empty(2, 3, 0, 5)
    for q_len in sizes:
        new_key, new_value = (torch.randn(2, 3, q_len, dim, generator=generator) for dim in (4, 5))
        for again in (True, False):
            cache.append(new_key, new_value)
            if again and q_len == 1 and cache.kv_len > 1:
                cache.truncate(cache.kv_len - 1)  # a step that failed after this layer
                for held, all_of_it in zip(cache.window(), (key, value), strict=True):
                    assert torch.equal(held, all_of_it[:, :, -(window - 1) :])
            elif again:
                break
        key, value = torch.cat([key, new_key], 2), torch.cat([value, new_value], 2)
        assert cache.kv_len == key.shape[2]
        for held, all_of_it in zip(cache.window(), (key, value), strict=True):
            assert torch.equal(held, all_of_it[:, :, -(window - 1) :])
        lines = 2 * 63  # keys and values each end with a cache line
        assert cache.device_bytes <= buffer_rows(window - 1) * 2 * 3 * 9 * 4 + lines


# Crop, several turns, handles -----------------------------------------------------------------------------------

WINDOW = 12
MIXED = TinyConfig(num_layers=2, window=WINDOW, window_layers=(0,))
ALONE = TinyConfig(num_layers=2, window=WINDOW, window_layers=(0, 1))


@cache
def both(config: TinyConfig) -> tuple[TinyDecoder, Any]:
    """A decoder, and compiled: once for tests that follow each other."""
    model = TinyDecoder(config)
    return model, compiled(model, CONFIG)


def ids(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(61, (2, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def turns(forward: Any, lengths: tuple[int, ...], tokens: Tensor) -> Tensor:
    """Logits of `tokens`, given in pieces of these lengths."""
    past, start, logits = None, 0, []
    for length in lengths:
        mask = torch.ones(2, start + length, dtype=torch.bool)
        mask[0, :2] = False
        out, past = forward(tokens[:, start : start + length], past=past, attention_mask=mask)
        logits.append(out)
        start += length
    return torch.cat(logits, 1)


LONGER, SHORTER, CHUNKS = (20, 1, 7, 1, 1), (5, 3, 1, 1, 9, 1, 1, 4), (6, 6, 6, 6)


@pytest.mark.parametrize(
    ("config", "lengths"),
    nightly_unless(
        lambda case: case == (MIXED, LONGER), itertools.product([MIXED, ALONE], [LONGER, SHORTER, CHUNKS])
    ),
    ids=str,
)
def test_turns_and_chunks_equal_the_plain_model(config: TinyConfig, lengths: tuple[int, ...]) -> None:
    (model, forward), tokens = both(config), ids(sum(lengths))
    torch.testing.assert_close(turns(forward, lengths, tokens), turns(model, lengths, tokens), **EXACT)


@torch.no_grad()
def test_going_back_beyond_a_full_window_is_refused_with_the_remedy() -> None:
    _, forward = both(MIXED)
    _, first = forward(ids(20), attention_mask=torch.ones(2, 20).bool())
    past = first
    for step in range(4):
        _, past = forward(ids(1, step), past=past, attention_mask=torch.ones(2, 21 + step).bool())
    with pytest.raises(specache_fx.CacheHandleError, match="has dropped pairs that it would need again"):
        forward(ids(1), past=first, attention_mask=torch.ones(2, 21).bool())
    _, past = forward(ids(1), past=past, attention_mask=torch.ones(2, 25).bool())  # the newest goes on
    assert specache_fx.stats(past).kv_len == 25


@torch.no_grad()
def test_handles_have_the_lengths_of_their_layers_and_bytes_are_bounded() -> None:
    _, forward = both(MIXED)
    ours = generate(forward, ids(5), 30)
    assert [key.shape[2] for key, _ in ours.past] == [WINDOW - 1, 34]
    stats = specache_fx.stats(ours.past)
    pair = 2 * 2 * (8 + 8) * 4  # batch, heads, key and value, float32
    assert stats.full_bytes == (WINDOW - 1 + 34) * pair
    session = session_of(ours.past)
    assert session.layers[0].device_bytes == buffer_rows(WINDOW - 1) * pair
    assert session.host is not None and session.host.length(0) == 0
    longer = generate(forward, ids(5), 60)
    found = session_of(longer.past)
    assert found.layers[0].device_bytes == session.layers[0].device_bytes


def cropped(past: Any, kv_len: int) -> Any:
    return [(key[:, :, :kv_len], value[:, :, :kv_len]) for key, value in past]


@pytest.mark.parametrize("config", nightly_unless(ALONE.__eq__, [MIXED, ALONE]), ids=["mixed", "alone"])
@torch.no_grad()
def test_crop_before_the_window_is_full_equals_the_plain_model(config: TinyConfig) -> None:
    results = []
    for run in both(config):
        _, past = run(ids(9), attention_mask=torch.ones(2, 9).bool())
        _, past = run(ids(1, 1), past=past, attention_mask=torch.ones(2, 10).bool())
        past = cropped(past, 7)
        logits = []
        for step in range(8):
            out, past = run(ids(1, step), past=past, attention_mask=torch.ones(2, 8 + step).bool())
            logits.append(out)
        results.append(torch.cat(logits, 1))
    torch.testing.assert_close(results[1], results[0], **EXACT)


@torch.no_grad()
def test_an_earlier_cache_of_full_windows_alone_goes_on_while_its_pairs_are_there() -> None:
    plain, forward = both(ALONE)
    masks = [torch.ones(2, length).bool() for length in range(20, 25)]
    (_, first), (_, plain_first) = (each(ids(20), attention_mask=masks[0]) for each in (forward, plain))
    _, second = forward(ids(1), past=first, attention_mask=masks[1])
    expected = plain(ids(1), past=plain_first, attention_mask=masks[1])[0]
    ours, again = forward(ids(1), past=first, attention_mask=masks[1])
    torch.testing.assert_close(ours, expected, **EXACT)
    with pytest.raises(specache_fx.CacheHandleError, match="branch that was left"):
        forward(ids(1), past=second, attention_mask=masks[2])
    for mask in masks[2:4]:
        _, again = forward(ids(1), past=again, attention_mask=mask)
    with pytest.raises(specache_fx.CacheHandleError, match="dropped pairs that it would need"):
        forward(ids(1), past=first, attention_mask=masks[1])
