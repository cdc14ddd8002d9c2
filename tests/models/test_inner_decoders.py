"""Decoders inside a larger model: under pictures, and beside an encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.multimodal import build_seq2seq, build_vision, picture_prompt
from support.zoo import TWO_LANES, left_padded
from torch import nn

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

GENERATE: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
STAGED: dict[str, Any] = {**TWO_LANES, "bits": 1, "top_k": 64}


def assert_equal_when_compiled(
    model: nn.Module, inner: nn.Module, prompt: Any, **options: Any
) -> specache_fx.SessionStats:
    expected = model.generate(**prompt, **GENERATE, output_logits=True)  # type: ignore[operator]
    inner.compile(backend="specache", options=options)
    found = model.generate(**prompt, **GENERATE, output_logits=True)  # type: ignore[operator]
    assert torch.equal(found.sequences, expected.sequences)
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    return specache_fx.stats(found.past_key_values)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("specache_fx")]


@pytest.mark.parametrize("name", nightly_unless("llava".__eq__, ["llava", "qwen2_5_vl"]))
def test_text_decoder_under_pictures_is_rewritten(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build_vision(name)
    with caplog.at_level("WARNING", logger="specache_fx"):
        stats = assert_equal_when_compiled(model, model, picture_prompt(name), **STAGED)
    assert (stats.kv_len, stats.steps) == (37, 23)
    assert stats.exact_hit_rate == 1.0 and stats.topk_hit_rate == 1.0
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("name", nightly_unless("gemma3".__eq__, ["llava", "gemma3"]))
def test_text_decoder_compiled_alone_takes_embeddings(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build_vision(name)
    options = {**TWO_LANES, "bits": 16}
    with caplog.at_level("WARNING", logger="specache_fx"):
        stats = assert_equal_when_compiled(model, model.model.language_model, picture_prompt(name), **options)
    assert (stats.kv_len, stats.steps) == (37, 23) and stats.prefetched_rows > 0
    assert stats.exact_hit_rate is None
    (warning,) = warnings_of(caplog)
    assert '"query" is used instead' in warning and "embeddings as input" in warning


@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.nightly)])
def test_decoder_beside_an_encoder_is_rewritten_and_cross_attention_is_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = build_seq2seq(name), left_padded((9, 13))
    with caplog.at_level("WARNING", logger="specache_fx"):
        stats = assert_equal_when_compiled(model, model, prompt, **STAGED)
    assert (stats.kv_len, stats.steps) == (24, 23)
    # The first step's length is 1, a constant of its graph that says nothing of the next position.
    assert stats.exact_hit_rate == 1.0 and stats.topk_hit_rate == 1.0
    prompt_warning, step_warning = warnings_of(caplog)
    assert "cross-attention" in prompt_warning and f"modeling_{name}.py" in prompt_warning
    assert "come into the graph whole" in step_warning and "cross-attention" in step_warning
