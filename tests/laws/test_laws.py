"""The laws of `docs/laws.md` on compiled models, against plain decoding and against the dense oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from support import strategies
from support.cases import examples, nightly_unless
from support.compiled import assert_oracles, assert_plain, forced_tokens, run
from support.models import TinyConfig, TinyDecoder, generate
from support.oracle_records import DecodeStep, OracleRun

import specache_fx
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.quant import QUANTIZERS
from specache_fx.runtime.session.metrics import Hits

EXACT_BY: dict[str, dict[str, Any]] = {
    "bits": {"bits": 16},
    "residual": {"residual_length": 100},
    "top_k": {"top_k": 100, "key_share": None},
    "key_share": {"key_share": 0.0, "value_share": None},
}


@settings(max_examples=examples(3))
@given(st.data(), st.sampled_from(tuple(EXACT_BY)), strategies.lookaheads)
def test_law_1_exact_settings_equal_plain_decoding(data: st.DataObject, how: str, lookahead: str) -> None:
    prompt = data.draw(strategies.prompts())
    config = data.draw(strategies.configs(lookahead=lookahead, **EXACT_BY[how]))
    assert_plain(prompt, config)


@settings(max_examples=examples(2))
@given(st.data(), st.sampled_from((torch.bfloat16, torch.float16)))
def test_law_1_holds_within_rounding_in_16_bits(data: st.DataObject, dtype: torch.dtype) -> None:
    prompt = data.draw(strategies.prompts(dtype))
    config = data.draw(strategies.configs(bits=16))
    forced = forced_tokens(prompt, 8, data.draw(strategies.seeds))
    plain = generate(prompt.model, prompt.input_ids, 8, prompt.attention_mask, forced)
    exact = TinyDecoder(prompt.model.config)
    exact.load_state_dict(prompt.model.state_dict())
    truth = generate(exact, prompt.input_ids, 8, prompt.attention_mask, forced)
    ours = run(prompt, config, 8, forced)
    # The error budget is what 16-bit arithmetic costs the plain model itself, with room for another order of sums.
    budget = (plain.logits.float() - truth.logits).abs().max()
    assert (ours.logits.float() - truth.logits).abs().max() <= 2 * budget + 1e-3


@settings(max_examples=examples(4))
@given(st.data())
def test_decoding_equals_the_dense_oracle(data: st.DataObject) -> None:
    # From 2 tokens: after a prompt of one, Dynamo makes the length a constant of the first decode graph, and lookahead
    # starts over with the second step (docs/architecture.md, Positions).
    prompt = data.draw(strategies.prompts(min_len=2))
    config = data.draw(
        strategies.configs(
            bits=data.draw(strategies.low_bits), track_hit_rates=data.draw(strategies.tracking)
        )
    )
    tokens, seed = 14, data.draw(strategies.seeds)
    forced = forced_tokens(prompt, tokens, seed)
    # In some steps some rows go on with what had been speculated for them.
    generator = torch.Generator().manual_seed(seed)
    guessed = torch.rand(forced.shape, generator=generator) < data.draw(st.sampled_from((0.0, 0.6, 1.0)))
    truth, _, session = assert_oracles(prompt, config, tokens, forced, guessed)
    assert session.metrics.steps == tokens - 1
    assert session.metrics.refetched_steps == sum(step.refetched is not None for step in truth.steps)
    assert_counted(session.metrics.hits, config, truth)
    series = session.metrics.series()
    assert len(series) == (tokens - 1 if config.track_hit_rates == "steps" else 0)
    for counted, step in zip(series, truth.steps, strict=False):
        assert counted.refetched == (step.refetched is not None)
        assert_counted(counted.hits, config, step)
    assert [counted.kv_len for counted in series] == list(
        range(session.kv_len - len(series) + 1, session.kv_len + 1)
    )


def assert_counted(hits: Hits, config: SpecacheConfig, truth: OracleRun | DecodeStep) -> None:
    if config.num_lanes == 2:
        assert (hits.token_hits, hits.token_checks) == truth.exact_hits
    if config.lookahead != "none" and config.track_hit_rates:
        assert (hits.topk_hits, hits.topk_needed) == truth.topk_hits
        assert (hits.mass, hits.best_mass) == pytest.approx(truth.mass, rel=1e-3, abs=1e-4)
    else:
        assert hits.topk_needed == hits.best_mass == 0


# Other laws draw KIVI and TurboQuant, and `test_quant.py` has the oracle's bits of each.
@pytest.mark.parametrize(
    "quantizer",
    nightly_unless(
        ("nuq", "zipcache").__contains__,
        [name for name, method in QUANTIZERS.items() if method.valid_bits[0] < 16],
    ),
)
@settings(max_examples=examples(1), phases=[Phase.explicit, Phase.generate])  # to shrink one takes minutes
@given(st.data())
def test_every_quantizer_equals_the_dense_oracle(quantizer: str, data: st.DataObject) -> None:
    prompt = data.draw(strategies.prompts(min_len=10, max_len=20))
    small = {"group_size": 4, "residual_length": 2, "top_k": 2, "resident_layers": 0}
    config = data.draw(
        strategies.configs(quantizer=quantizer, bits=QUANTIZERS[quantizer].valid_bits[0], **small)
    )
    forced = forced_tokens(prompt, 8, data.draw(strategies.seeds))
    _, _, session = assert_oracles(prompt, config, 8, forced)
    assert session.quantizer.name == quantizer and session.layers[0].num_quantized >= 12


@pytest.mark.parametrize(
    "options",
    nightly_unless(
        lambda options: "resident_layers" in options and "policy" not in options,
        [
            {"resident_layers": 1, "sink_tokens": 3},
            {"resident_layers": 2},
            {"lookahead": "none", "sink_tokens": 9},
            {"policy": "kivi", "resident_layers": 1, "sink_tokens": 3},
            {"policy": "kcache", "bits": 16, "resident_layers": 1},
        ],
    ),
    ids=str,
)
def test_every_policy_option_equals_the_dense_oracle(options: dict[str, Any]) -> None:
    model = TinyDecoder(TinyConfig(num_layers=2))
    config = SpecacheConfig(**{"bits": 1, "group_size": 4, "residual_length": 2, "top_k": 3, **options})
    mask = torch.arange(14)[None] >= torch.tensor([[5], [0]])
    ids = torch.randint(61, (2, 14), generator=torch.Generator().manual_seed(0))
    prompt = strategies.Prompt(model, ids, mask)
    forced = forced_tokens(prompt, 12, 1)
    truth, ours, _ = assert_oracles(prompt, config, 12, forced)
    plain = generate(model, ids, 12, mask, forced)
    exact = config.resident_layers == 2
    assert torch.allclose(truth.logits, plain.logits, atol=1e-3) == exact  # else this test would tell nothing
    stats = specache_fx.stats(ours.past)
    assert stats.exact_hit_rate == truth.exact_hits.rate
    if config.lookahead != "none":
        assert stats.topk_hit_rate == truth.topk_hits.rate


def kcache_prompt(data: st.DataObject) -> strategies.Prompt:
    """One that is no latent attention, which is left alone: its keys are computed from what is on the host."""
    prompt = data.draw(strategies.prompts(min_len=2))
    assume(prompt.model.config.latent_dim is None)
    return prompt


# `models/test_policies.py` has "top_k" by day.
@pytest.mark.parametrize("how", nightly_unless("residual".__eq__, ["residual", "top_k"]))
@settings(max_examples=examples(1))
@given(data=st.data())
def test_law_1_holds_for_kcache(data: st.DataObject, how: str) -> None:
    prompt = kcache_prompt(data)
    exact = {"residual": {"residual_length": 100}, "top_k": {"top_k": 100}}[how]
    config = data.draw(strategies.configs(policy="kcache", **exact))
    assert_plain(prompt, config)


@settings(max_examples=examples(2))
@given(st.data())
def test_kcache_equals_the_dense_oracle(data: st.DataObject) -> None:
    prompt = kcache_prompt(data)
    config = data.draw(strategies.configs(policy="kcache"))
    forced = forced_tokens(prompt, 12, data.draw(strategies.seeds))
    _, ours, _ = assert_oracles(prompt, config, 12, forced)
    stats = specache_fx.stats(ours.past)
    assert stats.exact_hit_rate is stats.topk_hit_rate is None
    # A row on the host is a value alone.
    assert stats.prefetched_bytes == stats.prefetched_rows * (prompt.model.config.value_dim or 0) * 4


@settings(max_examples=examples(2))
@given(st.data())
def test_kivi_equals_the_dense_oracle(data: st.DataObject) -> None:
    prompt = data.draw(strategies.prompts())
    config = data.draw(strategies.configs(policy="kivi", bits=data.draw(strategies.low_bits)))
    forced = forced_tokens(prompt, 10, data.draw(strategies.seeds))
    assert assert_oracles(prompt, config, 10, forced)[2].host_bytes == 0
