"""Static caches: steps and turns are those of a growing cache of the same session, and make no graph of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.counts import num_graphs
from support.open_sessions import session_of
from support.zoo import SMALL, TWO_LANES, build, left_padded
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import StaticCache

import specache_fx
from specache_fx.errors import CacheHandleError
from specache_fx.runtime.handles.handle_tensor import Handle

IDS = torch.arange(3, 40)[None]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def compiled(**options: Any) -> Any:
    counters.clear()
    return specache_fx.compile(build("llama"), **{**SMALL, "bits": 16, **options})


def static(model: Any, room: int = 90) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=room)


def steps(model: Any, past: Any, tokens: Tensor, **given: Any) -> Tensor:
    """Logits of tokens, one call each."""
    return torch.cat([model(each, past_key_values=past, **given).logits for each in tokens.split(1, 1)], 1)


@pytest.mark.parametrize("options", [{}, {"bits": 2}, {**TWO_LANES, "bits": 2}], ids=str)
@pytest.mark.parametrize(
    "given", [{}, {"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}], ids=str
)
def test_generate_has_the_graphs_and_answers_of_a_growing_cache(
    options: dict[str, Any], given: dict[str, Any]
) -> None:
    model = compiled(**options)
    prompt = left_padded((20, 13))
    for batch in ({"input_ids": prompt["input_ids"]}, prompt):
        made, outs = [], []
        for kind in (None, "static"):
            outs.append(
                model.generate(
                    **batch, **given, cache_implementation=kind, max_new_tokens=12, do_sample=False
                )
            )
            made.append(num_graphs())
        assert torch.equal(*outs)
        assert made[1] == made[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_cache_stays_the_callers(mode: Any) -> None:
    with mode():
        assert_stays()


def assert_stays() -> None:
    plain, model = build("llama"), compiled()
    past, expected = static(model), static(plain)
    model(IDS, past_key_values=past), plain(IDS, past_key_values=expected)
    buffers = [side for layer in past.layers for side in (layer.keys, layer.values)]
    for tokens in (IDS[:, :1], IDS[:, 4:9], IDS[:, :1]):
        for return_dict in (True, False):
            out = model(tokens, past_key_values=past, return_dict=return_dict)
            right = plain(tokens, past_key_values=expected)
            assert (out.past_key_values if return_dict else out[1]) is past
            torch.testing.assert_close(out[0], right.logits, **CLOSE)
    assert all(map(torch.equal, *((each.layers[0].cumulative_length,) for each in (past, expected))))
    assert all(
        one is other and isinstance(one, Handle) and one.shape[2] == 90
        for one, other in zip(
            buffers, (side for layer in past.layers for side in (layer.keys, layer.values)), strict=True
        )
    )
    assert session_of(past).kv_len == int(past.layers[0].cumulative_length)


@torch.no_grad()
def test_a_cache_whose_count_goes_back_goes_on_from_there() -> None:
    plain, model = build("llama"), compiled()
    found = []
    for each in (model, plain):
        past = static(each)
        each(IDS, past_key_values=past)
        logits = [steps(each, past, IDS[:, :4])]
        for layer in past.layers:
            layer.cumulative_length.sub_(6)
        logits += [steps(each, past, IDS[:, 7:10]), each(IDS[:, :5], past_key_values=past).logits]
        past.reorder_cache(torch.tensor([0]))
        logits.append(steps(each, past, IDS[:, 3:5]))
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(*found, **CLOSE)


@torch.no_grad()
def test_what_it_has_no_room_for_is_refused() -> None:
    model = compiled()
    past = static(model, 40)
    model(IDS, past_key_values=past)
    steps(model, past, IDS[:, :3])
    for tokens in (IDS[:, :1], IDS[:, :4]):
        with pytest.raises(CacheHandleError, match="has room for 40 tokens"):
            model(tokens, past_key_values=past)


@torch.no_grad()
def test_a_mask_that_shows_rows_behind_the_tokens_is_refused() -> None:
    plain, model = build("llama"), compiled()
    past, expected = static(model), static(plain)
    model(IDS, past_key_values=past), plain(IDS, past_key_values=expected)
    mask = torch.ones(1, 1, 1, 90, dtype=torch.bool)
    with pytest.raises(CacheHandleError, match="shows rows of a cache behind"):
        model(IDS[:, :1], past_key_values=past, attention_mask=mask)
    mask[..., 38:] = False
    mask[..., 3:7] = False
    for hides in (mask, torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)):
        for given in ({}, {"position_ids": torch.tensor([[37]])}):
            logits = [
                each(IDS[:, :1], past_key_values=cache, attention_mask=hides, **given).logits
                for each, cache in ((model, past), (plain, expected))
            ]
            torch.testing.assert_close(*logits, **CLOSE)
            for layer in (*past.layers, *expected.layers):
                layer.cumulative_length.sub_(1)


@torch.no_grad()
def test_a_mask_that_is_too_short_hides_the_newest() -> None:
    plain, model = build("llama"), compiled()
    past, expected = static(model), static(plain)
    model(IDS, past_key_values=past), plain(IDS, past_key_values=expected)
    given = {"attention_mask": torch.ones(1, 20).long(), "position_ids": torch.tensor([[37]])}
    logits = [
        each(IDS[:, :1], past_key_values=cache, **given).logits
        for each, cache in ((model, past), (plain, expected))
    ]
    torch.testing.assert_close(*logits, **CLOSE)


@torch.no_grad()
def test_a_step_that_is_left_alone_gives_the_buffers_back() -> None:
    plain, model = (build("llama", attn_implementation="eager") for _ in range(2))
    specache_fx.compile(model, **{**SMALL, "bits": 16})
    past, expected = static(model), static(plain)
    model(IDS, past_key_values=past), plain(IDS, past_key_values=expected)
    for given in ({"output_attentions": True}, {}, {}):
        logits = [
            each(IDS[:, :1], past_key_values=cache, **given).logits
            for each, cache in ((model, past), (plain, expected))
        ]
        torch.testing.assert_close(*logits, **CLOSE)
        assert int(past.layers[0].cumulative_length) == int(expected.layers[0].cumulative_length)


@torch.no_grad()
def test_a_write_into_a_buffer_is_noticed() -> None:
    model = compiled()
    past = static(model)
    model(IDS, past_key_values=past)
    past.layers[0].keys.zero_()
    with pytest.raises(CacheHandleError, match="was written to"):
        model(IDS[:, :1], past_key_values=past)


@torch.no_grad()
def test_a_turn_that_fails_can_be_made_again() -> None:
    plain, model = build("llama"), compiled()
    past, expected = static(model), static(plain)
    model(IDS, past_key_values=past), plain(IDS, past_key_values=expected)

    def strike(*_: Any) -> None:
        raise ArithmeticError

    hook = model.model.layers[1].register_forward_pre_hook(strike)
    with pytest.raises(ArithmeticError):
        model(IDS[:, :5], past_key_values=past)
    hook.remove()
    for tokens in (IDS[:, :5], IDS[:, 7:8]):
        logits = [
            each(tokens, past_key_values=cache).logits for each, cache in ((model, past), (plain, expected))
        ]
        torch.testing.assert_close(*logits, **CLOSE)
