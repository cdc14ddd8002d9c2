"""Multi-head latent attention: what is cached is what is quantised and offloaded; decoding equals the dense oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import strategies
from support.cases import examples, nightly_unless
from support.compiled import EXACT, assert_oracles, assert_plain, compiled
from support.models import TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from support.oracle import OracleDecoder
from support.zoo import SMALL, build, left_padded

import specache_fx
from specache_fx.config import SpecacheConfig

LATENT = TinyConfig(num_layers=1, num_heads=4, num_kv_heads=1, head_dim=16, value_dim=12, latent_dim=20)


@pytest.mark.nightly  # by day DeepSeek's generation is exact
@settings(max_examples=examples(2))
@given(st.data(), st.sampled_from(("bits", "top_k")), strategies.lookaheads)
def test_exact_settings_equal_plain_decoding(data: st.DataObject, how: str, lookahead: str) -> None:
    prompt = data.draw(strategies.prompts(latent=True))
    exact = {"bits": {"bits": 16}, "top_k": {"top_k": 100, "key_share": None}}[how]
    config = data.draw(strategies.configs(lookahead=lookahead, **exact))
    assert_plain(prompt, config)


@settings(max_examples=examples(1))
@given(st.data())
def test_decoding_equals_the_dense_oracle(data: st.DataObject) -> None:
    prompt = data.draw(strategies.prompts(min_len=2, latent=True))
    config = data.draw(strategies.configs(bits=data.draw(strategies.low_bits)))
    truth, _, session = assert_oracles(prompt, config, 14, None)
    if config.num_lanes == 2:
        assert session.metrics.hits.token_hits == sum(step.exact_hits.hits for step in truth.steps)
    if config.lookahead != "none":
        assert session.metrics.hits.topk_hits == sum(step.topk_hits.hits for step in truth.steps)


@pytest.mark.parametrize("policy", nightly_unless("specache".__eq__, ["specache", "kivi"]))
def test_extend_and_crop_go_on_with_latents(policy: str) -> None:
    model = TinyDecoder(LATENT)
    config = SpecacheConfig(
        bits=2, group_size=4, residual_length=4, top_k=6, policy=policy, track_hit_rates=False
    )
    forward, oracle = compiled(model, config), OracleDecoder(model, config)
    ids = torch.randint(LATENT.vocab_size, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, past = forward(ids[:, :13])
        torch.testing.assert_close(ours, oracle.prefill(ids[:, :13]), **EXACT)
        ours, past = forward(ids[:, 13:18], past=past)
        torch.testing.assert_close(ours, oracle.extend(ids[:, 13:18]), **EXACT)
        for step in range(18, 21):
            ours, past = forward(ids[:, step : step + 1], past=past)
            torch.testing.assert_close(ours[:, -1], oracle.decode(ids[:, step]).logits, **EXACT)
        if policy == "specache":
            past = [(k[:, :, :15], v[:, :, :15]) for k, v in past]
            oracle.crop(15)
        for step in range(21, 23):
            ours, past = forward(ids[:, step : step + 1], past=past)
            torch.testing.assert_close(ours[:, -1], oracle.decode(ids[:, step]).logits, **EXACT)


def test_kcache_leaves_latent_attention_alone_and_says_why() -> None:
    """Its keys are computed from the latent, which is cached as a value: on the host there would be no scores."""
    model, config = TinyDecoder(LATENT), SpecacheConfig(policy="kcache", group_size=4, residual_length=4)
    ids = torch.randint(LATENT.vocab_size, (2, 13), generator=torch.Generator().manual_seed(1))
    with pytest.raises(
        Exception, match=r"policy 'kcache' has only a part of that on the device.*Use policy=\"specache"
    ):
        compiled(model, replace(config, strict=True))(ids)
    torch.testing.assert_close(
        generate(compiled(model, config), ids, 8).logits, generate(model, ids, 8).logits, **EXACT
    )


def test_what_is_kept_is_what_the_model_caches() -> None:
    model = TinyDecoder(LATENT)
    config = SpecacheConfig(bits=1, group_size=16, residual_length=8, top_k=4)
    ids = torch.randint(LATENT.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
    ours, plain = generate(compiled(model, config), ids, 5), generate(model, ids, 5)
    session = session_of(ours.past)
    shape = session.shapes[0]
    assert (shape.num_kv_heads, shape.key_dim, shape.value_dim) == (1, 8, 20)
    assert session.full_bytes == sum(side.nbytes for layer in plain.past for side in layer)
    assert session.device_bytes < 0.5 * session.full_bytes
    assert [k.shape for k, _ in ours.past] == [k.shape for k, _ in plain.past]


@pytest.mark.parametrize("bits", nightly_unless((1).__eq__, [16, 1]))
def test_deepseek_generates_as_uncompiled(bits: int) -> None:
    torch._dynamo.reset()
    model: Any = build("deepseek_v3", 1)
    options = {
        "max_new_tokens": 40,
        "do_sample": False,
        "return_dict_in_generate": True,
        **left_padded((5, 33)),
    }
    plain = model.generate(**options)
    exact = {"bits": 16} if bits == 16 else {"bits": 1, "lookahead": "token", "top_k": 128}
    ours = specache_fx.compile(model, **{**SMALL, **exact}).generate(**options)
    assert torch.equal(ours.sequences, plain.sequences)
    stats = specache_fx.stats(ours.past_key_values)
    assert stats.steps == 39
    assert stats.full_bytes == sum(
        layer.keys.nbytes + layer.values.nbytes for layer in plain.past_key_values.layers
    )
