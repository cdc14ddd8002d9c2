"""Caches of fixed length of models with sliding windows, softcaps, sinks and eager attention: rewritten, and equal."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import TWO_LANES
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    StaticCache,
)

import specache_fx
from specache_fx.errors import CacheHandleError
from specache_fx.runners.base import inference
from specache_fx.runtime.session import fixed_buffers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WINDOW, VOCAB_SIZE = 16, 97
OPTIONS = TWO_LANES | {"bits": 16, "strict": True}
ALL_STAGED = {"bits": 1, "top_k": 256}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gemma3": (Gemma3TextConfig, MIXED | {"query_pre_attn_scalar": 32}, "sdpa"),
    "gemma2": (Gemma2Config, MIXED | {"query_pre_attn_scalar": 32}, "eager"),  # a softcap
    "gpt_oss": (GptOssConfig, MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "eager"),  # sinks
    "llama": (LlamaConfig, {}, "eager"),
}


def make(case: str) -> Any:
    config_class, more, implementation = CASES[case]
    torch.manual_seed(0)
    config = config_class(**SIZES, **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def both(case: str, **options: Any) -> tuple[Any, Any]:
    plain, model = make(case), make(case)
    model.compile(backend="specache", options=OPTIONS | options)
    return plain, model


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(seed))


class Pair:
    """A cache of the uncompiled model and one of the compiled one, which get the same calls."""

    def __init__(self, plain: Any, model: Any, capacity: int = 90) -> None:
        self.models = plain, model
        self.caches = [StaticCache(config=plain.config, max_cache_len=capacity) for _ in range(2)]

    def call(self, ids: Tensor) -> Tensor:
        """The next tokens `[batch, 1]`; all logits are compared."""
        expected, found = (
            model(ids, past_key_values=cache).logits
            for model, cache in zip(self.models, self.caches, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return expected[:, -1:].argmax(-1)

    def decode(self, ids: Tensor, count: int) -> None:
        for _ in range(count):
            ids = self.call(ids)

    def reset(self) -> None:
        for cache in self.caches:
            cache.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    nightly_unless(
        lambda case: case == ("gemma2", ALL_STAGED),
        [*((case, {}) for case in CASES), ("gemma3", ALL_STAGED), ("gemma2", ALL_STAGED)],
    ),
)
@torch.no_grad()
def test_three_generations_on_the_same_buffers(case: str, options: dict[str, Any]) -> None:
    pair = Pair(*both(case, **options))
    # Shorter than the window, which fills while decoding; longer; in pieces, of which one fills it.
    for count, pieces in ((WINDOW + 20, [9]), (5, [WINDOW + 9]), (12, [7, 5, 6, 4])):
        ids = torch.empty(0)
        for seed, length in enumerate(pieces):
            ids = pair.call(prompt(length, seed))
        pair.decode(ids, count)
        stats = specache_fx.stats(pair.caches[1])
        assert (stats.kv_len, stats.steps) == (sum(pieces) + count, count)
        assert stats.exact_hit_rate == 1.0
        pair.decode(prompt(3, 9), 1)
        pair.decode(ids, 2)
        pair.reset()


@pytest.mark.nightly  # by day a window fills in the first of three generations
@pytest.mark.parametrize("case", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_a_window_that_fills(case: str) -> None:
    pair = Pair(*both(case, **ALL_STAGED))
    pair.decode(prompt(WINDOW - 3), 8)
    assert specache_fx.stats(pair.caches[1]).exact_hit_rate == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("case", nightly_unless(lambda case: case == "gpt_oss", CASES))
def test_generate_past_the_window_of_a_padded_batch(case: str) -> None:
    plain, model = both(case, **ALL_STAGED)
    for length in (WINDOW + 14,) if case == "gpt_oss" else (10, WINDOW + 14):
        ids = prompt(length)
        mask = torch.ones_like(ids)
        mask[1, :6] = 0
        form: dict[str, Any] = {"min_new_tokens": 50, "max_new_tokens": 50, "return_dict_in_generate": True}
        form |= {"attention_mask": mask, "do_sample": False}
        expected = plain.generate(ids, **form).sequences
        found = model.generate(ids, cache_implementation="static", **form)
        assert torch.equal(found.sequences, expected)
        stats = specache_fx.stats(found.past_key_values)
        assert (stats.kv_len, stats.steps, stats.topk_hit_rate) == (length + 49, 49, 1.0)


@pytest.mark.parametrize("length", nightly_unless((WINDOW + 9).__eq__, [9, WINDOW, WINDOW + 9]))
@torch.no_grad()
def test_a_prompt_that_ran_uncompiled_is_taken_over(length: int) -> None:
    plain, model = both("gemma3")
    pair = Pair(plain, model)
    ids = prompt(length)
    for cache in pair.caches:
        plain(ids, past_key_values=cache)
    pair.decode(ids[:, :1], WINDOW)
    assert specache_fx.stats(pair.caches[1]).kv_len == length + WINDOW


@pytest.mark.nightly
@pytest.mark.parametrize("length", [9, WINDOW, WINDOW + 9])
@torch.no_grad()
def test_numbers_are_given_back(length: int) -> None:
    pair = Pair(*both("gemma3"))
    ids = pair.call(prompt(length))
    theirs, ours = ([(layer.keys, layer.values) for layer in cache.layers] for cache in pair.caches)
    with inference():
        fixed_buffers.restore([side for sides in ours for side in sides])
    for layer, capacity in enumerate((WINDOW, 90)):
        first = int(length >= capacity)  # no query reaches the oldest row of a full window
        for found, expected in zip(ours[layer], theirs[layer], strict=True):
            assert type(found) is Tensor
            torch.testing.assert_close(found[:, :, first:], expected[:, :, first:], rtol=1e-4, atol=1e-4)
    pair.decode(ids, 3)


@torch.no_grad()
def test_layers_that_disagree_are_refused() -> None:
    pair = Pair(*both("gemma3"))
    pair.decode(prompt(WINDOW + 4), 3)
    pair.caches[1].layers[1].cumulative_length.fill_(10)  # the window can't go back
    with pytest.raises(CacheHandleError, match="a window can't go back"):
        pair.models[1](prompt(1), past_key_values=pair.caches[1])
    pair.caches[1].layers[1].cumulative_length.fill_(0)
    with pytest.raises(CacheHandleError, match="a window can't go back"):
        pair.models[1](prompt(1), past_key_values=pair.caches[1])
    pair.caches[1].layers[1].cumulative_length.fill_(WINDOW + 6)
    pair.decode(prompt(1), 2)


@torch.no_grad()
def test_windows_alone_are_left_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=WINDOW)
    plain = AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.compile(backend="specache", options=OPTIONS | {"strict": False})
    pair = Pair(plain, model)
    with caplog.at_level(logging.WARNING, "specache_fx"):
        pair.decode(prompt(WINDOW + 9), 5)
    assert "keep the newest tokens alone" in caplog.text
    with pytest.raises(CacheHandleError, match="no KV cache of specache"):
        specache_fx.stats(pair.caches[1])
