"""The oracle against hand-computed examples and against plain SDPA decoding: who checks the checker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import strategies
from support.models import TinyConfig, TinyDecoder, generate
from support.oracle import OracleDecoder
from support.oracle_cache import OracleCache
from support.oracle_quant import select
from support.oracle_records import overlap
from torch import Tensor

from specache_fx.config import Lookahead, SpecacheConfig

SMALL: dict[str, Any] = {"group_size": 4, "residual_length": 4}
TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}


def _padded_prompt(prompt_len: int = 23) -> tuple[TinyDecoder, Tensor, Tensor]:
    model = TinyDecoder(TinyConfig(num_layers=2))
    input_ids = torch.randint(61, (2, prompt_len), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.arange(prompt_len)[None, :] >= torch.tensor([[6], [0]])
    return model, input_ids, attention_mask


# Selection, by hand


def test_select_breaks_ties_by_lowest_index_and_skips_padding() -> None:
    scores = torch.tensor([[[0.2, 0.3, 0.2, 0.3, 0.0]], [[0.9, 0.1, 0.1, 0.1, 0.0]]])
    mask = torch.tensor([[True] * 5, [False, True, True, True, True]])
    assert select(scores, mask, 3) == [[[1, 3, 0]], [[1, 2, 3]]]


def test_select_gives_all_real_positions_where_fewer_than_k() -> None:
    scores = torch.tensor([[[0.0, 0.0, 0.5]]])
    assert select(scores, torch.tensor([[True, False, True]]), 16) == [[[2, 0]]]
    assert select(torch.zeros(1, 2, 0), torch.ones(1, 0, dtype=torch.bool), 4) == [[[], []]]


def test_overlap_counts_wanted_positions() -> None:
    assert overlap([[[1, 2], [3]]], [[[2, 5], [3]]]) == (2, 3)


# One layer, by hand


def test_residual_window_moves_by_whole_groups() -> None:
    cache = OracleCache(
        SpecacheConfig(group_size=4, residual_length=3), torch.zeros(1, 1, 0, 2), torch.zeros(1, 1, 0, 2)
    )
    assert [cache.num_quantized_at(kv_len) for kv_len in (0, 3, 6, 7, 10, 11)] == [0, 0, 0, 4, 4, 8]
    assert [cache.num_quantized_at(kv_len) for kv_len in range(80)] == [
        cache.config.num_quantized(kv_len) for kv_len in range(80)
    ]


def test_attend_two_lanes_by_hand() -> None:
    # Zero queries weigh all visible pairs alike: each output is a mean that shows who saw what.
    config = SpecacheConfig(bits=1, group_size=2, residual_length=1, quantizer="kivi")
    v = torch.tensor([0.0, 4.0, 10.0]).view(1, 1, 3, 1)
    cache = OracleCache(config, torch.zeros(1, 1, 3, 1), v)
    assert cache.num_quantized == 2
    own = torch.tensor([100.0, 1000.0]).view(2, 1, 1, 1, 1)
    zeros = torch.zeros(2, 1, 1, 1, 1)
    # Values are grouped by channels: a lone channel is a constant group, so C' has them exactly.
    out, scores = cache.attend(zeros, zeros, own, None, scale=1.0)
    assert out.flatten().tolist() == pytest.approx([114 / 4, 1114 / 5])
    assert scores.shape == (2, 1, 1, 2)
    assert scores[:, 0, 0, 0].tolist() == pytest.approx([1 / 4, 1 / 5])


def test_attend_sees_staged_pairs_at_16_bits() -> None:
    config = SpecacheConfig(bits=1, group_size=4, residual_length=0, quantizer="kivi")
    k = torch.tensor([-4.0, -1.0, 0.5, 4.0]).view(1, 1, 4, 1)
    cache = OracleCache(config, k, k)
    assert cache.device_pairs(None)[0].flatten().tolist() == [-2.0, -2.0, 2.0, 2.0]
    assert cache.device_pairs([[[3, 1]]])[0].flatten().tolist() == [-2.0, -1.0, 2.0, 4.0]
    assert cache.k.flatten().tolist() == [-4.0, -1.0, 0.5, 4.0]


def test_kcache_adds_up_fetched_values_and_the_windows_without_renormalising() -> None:
    # Zero queries weigh all pairs alike, the own one too: a fifth each, whoever's value is there.
    config = SpecacheConfig(policy="kcache", group_size=3, residual_length=1)
    v = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 1, 4, 1)
    cache = OracleCache(config, torch.zeros(1, 1, 4, 1), v)
    assert cache.num_quantized == 3
    zeros, own = torch.zeros(1, 1, 1, 1, 1), torch.full((1, 1, 1, 1, 1), 10000.0)
    out, scores = cache.attend(zeros, zeros, own, [[[1]]], scale=1.0)
    assert out.item() == pytest.approx((10 + 1000 + 10000) / 5)
    assert scores.flatten().tolist() == pytest.approx([1 / 5] * 3)
    out, _ = cache.attend(zeros, zeros, own, None, scale=1.0)
    assert out.item() == pytest.approx((1000 + 10000) / 5)


@given(st.data(), strategies.attention_shapes(), st.integers(1, 40), strategies.configs())
def test_attend_never_sees_padding(
    data: st.DataObject, shape: strategies.AttentionShape, kv_len: int, config: SpecacheConfig
) -> None:
    generator = torch.Generator().manual_seed(data.draw(strategies.seeds))
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    k = torch.randn(shape.batch, kv_heads, kv_len, shape.head_dim, generator=generator)
    v = torch.randn(shape.batch, kv_heads, kv_len, shape.value_dim, generator=generator)
    q = torch.randn(2, shape.batch, heads, 1, shape.head_dim, generator=generator)
    own_k = torch.randn(2, shape.batch, kv_heads, 1, shape.head_dim, generator=generator)
    own_v = torch.randn(2, shape.batch, kv_heads, 1, shape.value_dim, generator=generator)
    mask = data.draw(strategies.key_masks(shape.batch, kv_len))
    cache = OracleCache(config, k, v, mask)
    _, scores = cache.attend(q, own_k, own_v, None, 0.3)
    chosen = select(scores[-1], mask, config.top_k)
    for row, row_heads in enumerate(chosen):
        for positions in row_heads:
            real = mask[row, : cache.num_quantized].nonzero().flatten().tolist()
            assert len(positions) == len(set(positions)) == min(config.top_k, len(real))
            assert set(positions) <= set(real)
    assert (scores.masked_select(~mask[None, :, None, : cache.num_quantized]) == 0).all()
    # Values of padding alone cannot reach the output where they are grouped token by token.
    config = replace(config, quantizer="kivi")
    cache = OracleCache(config, k, v, mask)
    other = OracleCache(config, k, v.masked_fill(~mask[:, None, :, None], 1e4), mask)
    torch.testing.assert_close(
        other.attend(q, own_k, own_v, chosen, 0.3)[0], cache.attend(q, own_k, own_v, chosen, 0.3)[0]
    )


@given(strategies.configs(policy="specache"), strategies.seeds, st.integers(1, 30), st.integers(1, 30))
def test_append_one_by_one_equals_all_at_once_and_crop_undoes_it(
    config: SpecacheConfig, seed: int, first: int, more: int
) -> None:
    k, v = (strategies.filled((1, 2, first + more, 8), torch.float32, "random", seed + i) for i in range(2))
    cache = OracleCache(config, k[:, :, :first], v[:, :, :first])
    before = cache.device_pairs()
    for token in range(first, first + more):
        cache.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
    for grown, whole in zip(cache.device_pairs(), OracleCache(config, k, v).device_pairs(), strict=True):
        assert torch.equal(grown, whole)
    cache.crop(first)
    for cropped, kept in zip(cache.device_pairs(), before, strict=True):
        assert torch.equal(cropped, kept)


# The whole decoder


@given(st.data(), strategies.lookaheads, st.sampled_from(("bits", "residual", "kivi")))
def test_exact_configs_equal_plain_decoding(data: st.DataObject, lookahead: str, how: str) -> None:
    prompt = data.draw(strategies.prompts())
    exact = {"residual_length": 100} if how == "residual" else {"bits": 16}
    policy = "kivi" if how == "kivi" else "specache"
    config = data.draw(strategies.configs(lookahead=lookahead, policy=policy, **exact))
    plain = generate(prompt.model, prompt.input_ids, 8, prompt.attention_mask)
    run = OracleDecoder(prompt.model, config).generate(
        prompt.input_ids, 8, prompt.attention_mask, forced=plain.tokens[:, :-1]
    )
    torch.testing.assert_close(run.logits, plain.logits, **TOLERANCE)


@pytest.mark.parametrize("lookahead", ["token", "query", "none"])
def test_top_k_of_everything_equals_plain_decoding(lookahead: Lookahead) -> None:
    model, input_ids, attention_mask = _padded_prompt()
    plain = generate(model, input_ids, 14, attention_mask)
    config = SpecacheConfig(bits=1, top_k=64, lookahead=lookahead, **SMALL)
    decoder = OracleDecoder(model, config)
    run = decoder.generate(input_ids, 14, attention_mask)
    torch.testing.assert_close(run.logits, plain.logits, **TOLERANCE)
    assert torch.equal(run.tokens, plain.tokens)
    assert run.topk_hits.rate == 1


def test_a_fresh_group_is_selected_in_the_step_that_quantises_it() -> None:
    model, input_ids, attention_mask = _padded_prompt(23)
    config = SpecacheConfig(bits=1, top_k=64, lookahead="token", **SMALL)
    run = OracleDecoder(model, config).generate(input_ids, 6, attention_mask)
    staged = [step.staged[0][1][0] for step in run.steps]
    # Past lengths 23 to 27: a group of 4 leaves the window of 4 when the length reaches 24.
    assert [len(positions) for positions in staged] == [16, 20, 20, 20, 20]
    assert [step.scores[0].shape[-1] for step in run.steps] == [16, 20, 20, 20, 20]


def test_lane_one_of_an_exact_cache_is_one_step_ahead() -> None:
    model, input_ids, attention_mask = _padded_prompt()
    run = OracleDecoder(model, SpecacheConfig(bits=16, lookahead="token", **SMALL)).generate(
        input_ids, 10, attention_mask
    )
    for step, following in zip(run.steps, run.steps[1:], strict=False):
        assert step.lane1_token is not None
        assert torch.equal(step.lane1_token, following.token)
        torch.testing.assert_close(step.lane1_logits, following.logits, **TOLERANCE)
    assert run.exact_hits == (16, 16)


def test_lane_zero_depends_on_lane_one_only_through_its_selection() -> None:
    model, input_ids, attention_mask = _padded_prompt()
    config = SpecacheConfig(bits=2, top_k=4, lookahead="token", **SMALL)
    decoders = [OracleDecoder(model, config) for _ in range(2)]
    for decoder in decoders:
        decoder.prefill(input_ids, attention_mask)
        decoder.decode(torch.tensor([5, 6]))
    decoders[1].speculative = torch.tensor([7, 8])
    steps = [decoder.decode(torch.tensor([9, 10])) for decoder in decoders]
    torch.testing.assert_close(steps[0].logits, steps[1].logits, **TOLERANCE)
    lane1_logits = [step.lane1_logits for step in steps if step.lane1_logits is not None]
    assert not torch.equal(*lane1_logits)


def test_predecode_runs_once_after_prefill_extend_and_crop() -> None:
    model, input_ids, attention_mask = _padded_prompt()
    decoder = OracleDecoder(model, SpecacheConfig(bits=2, top_k=4, lookahead="token", **SMALL))
    token = torch.tensor([5, 6])
    decoder.prefill(input_ids, attention_mask)
    seen = [decoder.decode(token).predecoded for _ in range(2)]
    decoder.extend(input_ids[:, :3])
    seen += [decoder.decode(token).predecoded for _ in range(2)]
    decoder.crop(decoder.kv_len)
    seen.append(decoder.decode(token).predecoded)
    decoder.crop(decoder.kv_len - 2)
    seen.append(decoder.decode(token).predecoded)
    assert seen == [True, False, True, False, False, True]


def test_kivi_stages_nothing_and_extends_on_low_bit_history() -> None:
    model, input_ids, attention_mask = _padded_prompt()
    logits = {}
    for policy in ("kivi", "specache"):
        decoder = OracleDecoder(model, SpecacheConfig(policy=policy, bits=1, **SMALL))
        decoder.prefill(input_ids, attention_mask)
        logits[policy] = decoder.extend(input_ids[:, :3])
        step = decoder.decode(torch.tensor([5, 6]))
        if policy == "kivi":
            assert step.staged == [[], []]
            assert step.lane1_logits is None
            assert step.topk_hits == (0, 0)
    whole = torch.cat((input_ids, input_ids[:, :3]), dim=1)
    plain = model(whole, attention_mask=torch.cat((attention_mask, attention_mask.new_ones(2, 3)), dim=1))[0]
    torch.testing.assert_close(logits["specache"], plain[:, -3:], **TOLERANCE)
    assert not torch.allclose(logits["kivi"], plain[:, -3:], atol=1e-2)


def _mask_of(prompt: strategies.Prompt) -> torch.Tensor:
    """Its mask, without padding where the model spells attention out: there what a padded query sees is the length."""
    spelt_out = prompt.model.config.softcap is not None or prompt.model.sinks is not None
    return torch.ones_like(prompt.attention_mask) if spelt_out else prompt.attention_mask.clone()


@given(st.data(), strategies.lookaheads, st.integers(1, 12))
def test_chunked_prefill_gives_the_same_steps(data: st.DataObject, lookahead: str, split: int) -> None:
    prompt = data.draw(strategies.prompts(min_len=2))
    split = min(split, prompt.input_ids.shape[1] - 1)
    config = data.draw(strategies.configs(lookahead=lookahead))
    forced = torch.randint(61, (len(prompt.input_ids), 4), generator=torch.Generator().manual_seed(0))
    # float64 throughout: no near tie may be decided by the chunking.
    model = prompt.model.double()
    one, two = (OracleDecoder(model, config, torch.float64) for _ in range(2))
    mask = _mask_of(prompt)
    one.prefill(prompt.input_ids, mask)
    two.prefill(prompt.input_ids[:, :split], mask[:, :split])
    two.extend(prompt.input_ids[:, split:], mask[:, split:])
    for token in forced.T:
        torch.testing.assert_close(one.decode(token).logits, two.decode(token).logits)


@given(st.data(), strategies.lookaheads, st.integers(1, 6))
def test_decode_after_crop_equals_a_fresh_run(data: st.DataObject, lookahead: str, cropped: int) -> None:
    prompt = data.draw(strategies.prompts(min_len=2))
    cropped = min(cropped, prompt.input_ids.shape[1] - 1)
    kept = prompt.input_ids.shape[1] - cropped
    config = data.draw(strategies.configs(lookahead=lookahead))
    model = prompt.model.double()
    fresh, used = (OracleDecoder(model, config, torch.float64) for _ in range(2))
    mask = _mask_of(prompt)
    mask[:, kept - 1] = True
    fresh.prefill(prompt.input_ids[:, :kept], mask[:, :kept])
    used.prefill(prompt.input_ids, mask)
    used.crop(kept)
    for token in torch.arange(3 * len(mask)).view(3, -1):
        first, second = fresh.decode(token), used.decode(token)
        torch.testing.assert_close(first.logits, second.logits)
        assert first.staged == second.staged


# The tiny decoder


@given(strategies.prompts(max_len=12))
def test_tiny_decoder_is_not_touched_by_left_padding(prompt: strategies.Prompt) -> None:
    padded = generate(prompt.model, prompt.input_ids, 3, prompt.attention_mask)
    for row, mask in enumerate(prompt.attention_mask):
        alone = generate(
            prompt.model, prompt.input_ids[row : row + 1, mask], 3, forced=padded.tokens[row : row + 1]
        )
        torch.testing.assert_close(padded.logits[row : row + 1], alone.logits, **TOLERANCE)
