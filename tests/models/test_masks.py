"""Masks that are not the prompt's padding are applied, or refused; never dropped."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from support.models import TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from support.zoo import TWO_LANES, build
from torch import Tensor, nn

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS = TWO_LANES | {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4}


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="specache", options=OPTIONS)


def prompt(tokens: int = 20) -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[0, :5] = False
    return torch.randint(61, (2, tokens), generator=torch.Generator().manual_seed(0)), mask


def step(model: Any, past: Any, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3], [4]]), past=past, attention_mask=mask)[0]


def drive(model: Any, masks: list[Tensor]) -> Tensor:
    """Logits of the prompt's next token, then of one step per further mask."""
    with torch.no_grad():
        logits, past = model(prompt()[0], attention_mask=masks[0])
        found = [logits[:, -1]]
        for i, mask in enumerate(masks[1:]):
            logits, past = model(torch.tensor([[3 + i], [40 - i]]), past=past, attention_mask=mask)
            found.append(logits[:, -1])
    return torch.stack(found)


def extended(mask: Tensor, steps: int) -> list[Tensor]:
    return [torch.cat([mask, mask.new_ones(2, i)], dim=1) for i in range(steps + 1)]


def key_hidden_after_the_prompt(masks: list[Tensor]) -> None:
    for mask in masks[1:]:
        mask[1, 7] = False


def key_hidden_in_a_later_step(masks: list[Tensor]) -> None:
    for mask in masks[6:]:
        mask[0, 9] = False


def row_that_is_finished(masks: list[Tensor]) -> None:
    for i, mask in enumerate(masks[6:], 5):  # as some servers mask it
        mask[1, 20 + i - 3 :] = False


def key_hidden_for_a_while(masks: list[Tensor]) -> None:
    for mask in masks[3:6]:
        mask[1, 2] = False


def padding_that_is_shown_again(masks: list[Tensor]) -> None:
    for mask in masks[4:]:
        mask[0, 3] = True


def row_without_any_key(masks: list[Tensor]) -> None:
    masks[5][0] = False


CHANGES = (
    key_hidden_after_the_prompt,
    key_hidden_in_a_later_step,
    row_that_is_finished,
    key_hidden_for_a_while,
    padding_that_is_shown_again,
    row_without_any_key,
)


@pytest.mark.parametrize("options", [{}, {"bits": 1, "top_k": 64}], ids=["bits 16", "all prefetched"])
def test_a_mask_that_changes_after_the_prompt_is_applied(options: dict[str, Any]) -> None:
    plain = TinyDecoder(TinyConfig(num_layers=1))
    model = torch.compile(plain, backend="specache", options={**OPTIONS, **options})
    unchanged = drive(plain, extended(prompt()[1], 14))
    for change in CHANGES:
        masks = extended(prompt()[1], 14)
        change(masks)
        expected = drive(plain, masks)
        assert not torch.allclose(expected, unchanged, atol=1e-3), change.__name__
        assert torch.allclose(drive(model, masks), expected, rtol=2e-4, atol=2e-4), change.__name__


def test_a_mask_per_head_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class PerHead(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            groups = self.config.num_heads // self.config.num_kv_heads
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            hidden = torch.arange(k.shape[2]) < torch.arange(q.shape[1])[:, None, None]  # [heads, 1, kv_len]
            allowed = (mask[0] & ~hidden).expand(q.shape[1], q.shape[2], -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)

    model = PerHead(TinyConfig(num_layers=1, num_heads=2, num_kv_heads=2))  # as many heads as batch rows
    input_ids = prompt()[0]
    plain = generate(model, input_ids, 8)
    torch.testing.assert_close(generate(compiled(model), input_ids, 8).logits, plain.logits)
    assert "may hide other keys from head to head" in caplog.text


def test_a_mask_that_is_left_out_after_a_padded_prompt_hides_nothing_any_more() -> None:
    class Maskless(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            if q.shape[2] == 1:
                return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)
            return super().sdpa(q, k, v, mask)

    plain, masks = Maskless(TinyConfig(num_layers=1)), extended(prompt()[1], 8)
    torch.testing.assert_close(drive(compiled(plain), masks), drive(plain, masks), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "tokens",
    nightly_unless(lambda tokens: tokens == 23, [10, 23, 24, 40]),
    ids=lambda tokens: f"prompt of {tokens}",
)
@pytest.mark.parametrize(
    "layers", nightly_unless(lambda case: case == ((1,),), [((0, 1),), ((0,),), ((1,),)]), ids=str
)
def test_a_sliding_window_over_a_whole_cache_is_applied(layers: tuple[int, ...], tokens: int) -> None:
    plain = TinyDecoder(TinyConfig(local_reach=24, local_layers=layers))
    input_ids, mask = prompt(tokens)
    expected = generate(plain, input_ids, 30, mask)
    for options in ({}, {"bits": 1, "top_k": 128}):
        torch._dynamo.reset()
        ours = generate(
            torch.compile(plain, backend="specache", options={**OPTIONS, **options}), input_ids, 30, mask
        )
        torch.testing.assert_close(ours.logits, expected.logits, rtol=2e-4, atol=2e-4)
        session = session_of(ours.past)
        if not options:  # lane 1 hides what its own token will not see
            assert session.metrics.hits.token_checks == session.metrics.hits.token_hits > 50


def test_a_bias_in_an_additive_mask_equals_plain_decoding() -> None:
    class Biased(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) - 0.5 * torch.arange(k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)

    model = Biased(TinyConfig(num_layers=1))
    input_ids, mask = prompt()
    plain = generate(model, input_ids, 20, mask)
    ours = generate(compiled(model), input_ids, 20, mask)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)


def test_a_bias_that_is_written_in_place_equals_plain_decoding() -> None:
    class FixedCacheRunner(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.zeros(q.shape[1], q.shape[2], k.shape[2])
            bias[1:, :, :] = -0.3 * torch.arange(k.shape[2])
            bias = bias + torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)

    model = FixedCacheRunner(TinyConfig(num_layers=1))
    input_ids, mask = prompt()
    plain = generate(model, input_ids, 20, mask)
    ours = generate(compiled(model), input_ids, 20, mask)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)


def test_a_bias_that_is_not_finite_is_refused() -> None:
    class Infinite(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.zeros(mask.shape).masked_fill(torch.arange(k.shape[2]) == 3, torch.inf)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)

    with pytest.raises(specache_fx.UnsupportedGraphError, match="neither finite nor -inf"), torch.no_grad():
        compiled(Infinite(TinyConfig(num_layers=1)))(prompt()[0])


def test_an_additive_mask_that_hides_from_some_heads_only_is_refused() -> None:
    class PerHead(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            hidden = torch.arange(k.shape[2]) < torch.arange(q.shape[1])[:, None, None]
            added = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).expand(-1, q.shape[2], -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=self.scale, enable_gqa=True)

    with pytest.raises(specache_fx.UnsupportedGraphError, match="some heads only"), torch.no_grad():
        compiled(PerHead(TinyConfig(num_layers=1)))(prompt()[0])


def test_an_additive_padding_mask_equals_plain_decoding() -> None:
    class Additive(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=self.scale, enable_gqa=True)

    model = Additive(TinyConfig(num_layers=1))
    input_ids, mask = prompt()
    plain = generate(model, input_ids, 20, mask)
    ours = generate(compiled(model), input_ids, 20, mask)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)


def test_a_mask_of_floats_equals_plain_decoding() -> None:
    class Floats(TinyDecoder):
        def forward(self, *args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
            return super().forward(*args, attention_mask=attention_mask.bool(), **kwargs)

    model = Floats(TinyConfig(num_layers=1))
    input_ids, mask = prompt()

    def run(forward: Any) -> Tensor:
        keys, found = mask.float(), []
        with torch.no_grad():
            logits, past = forward(input_ids, attention_mask=keys)
            for _ in range(20):
                found.append(logits[:, -1])
                keys = torch.cat([keys, keys.new_ones(2, 1)], dim=1)
                logits, past = forward(found[-1].argmax(-1, keepdim=True), past=past, attention_mask=keys)
        return torch.stack(found)

    torch.testing.assert_close(run(compiled(model)), run(model), rtol=2e-4, atol=2e-4)


def test_a_mask_over_queries_in_a_step_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    plain, compiled = build("llama"), specache_fx.compile(model, **TWO_LANES, prompts="traced")
    ids = torch.arange(12)[None] + 3

    @torch.no_grad()
    def step(model: Any) -> Tensor:
        past = model(ids[:, :-1], use_cache=True).past_key_values
        given = {"position_ids": torch.tensor([[11]]), "past_key_values": past, "use_cache": True}
        mask = torch.zeros(1, 1, 1, 12).masked_fill(torch.arange(12) == 4, torch.finfo(torch.float32).min)
        return model(ids[:, -1:], attention_mask=mask, **given).logits

    torch.testing.assert_close(step(compiled), step(plain))
    (said,) = (text for text in caplog.messages if text.startswith("specache: attention"))
    assert re.search(r"is left alone: the mask of `\w+` is computed from input `\w+`, which is neither", said)
    assert 'compile this model with backend="inductor". 1 more like it.' in said


@torch.no_grad()
def test_the_speculative_token_has_its_own_mask_in_batches_of_any_size() -> None:
    """Dynamo has a symbol for the size of a mask's batch alone once it has seen two: that is no length."""

    def steps(model: nn.Module, batch: int) -> Tensor:
        ids = torch.randint(1, 100, (batch, 64), generator=torch.Generator().manual_seed(batch))
        mask = torch.ones(batch, 80, dtype=torch.int64)
        mask[:, 30:50] = 0
        past, logits = None, []
        for end in range(64, 80):
            new = ids if past is None else ids[:, end - 64 : end - 63]
            out = model(new, attention_mask=mask[:, :end], past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits[:, -1])
        return torch.stack(logits)

    model = build("falcon")  # its mask is ALiBi's bias
    options = {**TWO_LANES, "bits": 2, "on_miss": "keep", "strict": True}
    model.compile(backend="specache", options=options)
    wanted = steps(model, 3)
    torch._dynamo.reset()
    model.compile(backend="specache", options=options)
    steps(model, 2)
    torch.testing.assert_close(steps(model, 3), wanted)
