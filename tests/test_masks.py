"""Masks that are not the prompt's padding are never dropped silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import TinyConfig, TinyDecoder, generate
from torch import Tensor

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4, "lowering": "eager"}


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="specache", options=OPTIONS)


def prompt(tokens: int = 20) -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[0, :5] = False
    return torch.randint(61, (2, tokens), generator=torch.Generator().manual_seed(0)), mask


def step(model: Any, past: Any, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3], [4]]), past=past, attention_mask=mask)[0]


def test_a_mask_that_changed_after_the_prompt_is_refused() -> None:
    model = compiled(TinyDecoder(TinyConfig()))
    input_ids, mask = prompt()
    with torch.no_grad():
        past = model(input_ids, attention_mask=mask)[1]
    longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    longer[1, 7] = False
    with pytest.raises(specache_fx.UnsupportedGraphError, match="hides other keys than the prompt's padding"):
        step(model, past, longer)


def test_a_mask_that_changes_in_a_later_step_is_refused_in_that_step() -> None:
    model = torch.compile(
        TinyDecoder(TinyConfig()), backend="specache", options={**OPTIONS, "group_size": 64}
    )
    input_ids, mask = prompt()
    with torch.no_grad():
        past = model(input_ids, attention_mask=mask)[1]
        for _ in range(5):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            past = model(torch.tensor([[3], [4]]), past=past, attention_mask=mask)[1]
        mask = torch.cat([mask, mask.new_zeros(2, 1)], dim=1)  # a finished row, as some servers mask it
        with pytest.raises(specache_fx.UnsupportedGraphError, match="hides other keys"):
            model(torch.tensor([[3], [4]]), past=past, attention_mask=mask)


def test_a_mask_per_head_is_left_alone() -> None:
    class PerHead(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            groups = self.config.num_heads // self.config.num_kv_heads
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            hidden = torch.arange(k.shape[2]) < torch.arange(q.shape[1])[:, None, None]  # [heads, 1, kv_len]
            allowed = (mask[0] & ~hidden).expand(q.shape[1], q.shape[2], -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)

    model = PerHead(TinyConfig(num_heads=2, num_kv_heads=2))  # as many heads as batch rows
    input_ids = prompt()[0]
    plain = generate(model, input_ids, 8)
    assert torch.equal(generate(compiled(model), input_ids, 8).tokens, plain.tokens)
    report = specache_fx.explain(model, run=lambda m: m(input_ids))
    assert "hides other keys from head to head" in str(report)


def test_a_mask_that_is_left_out_after_a_padded_prompt_is_refused() -> None:
    class Maskless(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            if q.shape[2] == 1:
                return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)
            return super().sdpa(q, k, v, mask)

    model = compiled(Maskless(TinyConfig()))
    input_ids, mask = prompt()
    with torch.no_grad():
        past = model(input_ids, attention_mask=mask)[1]
    with pytest.raises(specache_fx.UnsupportedGraphError, match="The prompt had padding"):
        step(model, past, torch.cat([mask, mask.new_ones(2, 1)], dim=1))


class Window(TinyDecoder):
    """A sliding window of 24 tokens that lives in the mask alone; the cache is whole."""

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        newest = k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None]
        return super().sdpa(q, k, v, mask & (torch.arange(k.shape[2])[None, :] > newest - 24))


def test_a_sliding_window_is_refused_before_it_hides_a_key() -> None:
    plain = Window(TinyConfig())
    model = compiled(plain)
    input_ids = prompt(10)[0]
    expected = generate(plain, input_ids, 30)
    mask = torch.ones(2, 10, dtype=torch.bool)
    with torch.no_grad():
        logits, past = model(input_ids, attention_mask=mask)
        tokens = [logits[:, -1].argmax(-1)]
        with pytest.raises(specache_fx.UnsupportedGraphError, match="sliding window"):  # noqa: PT012
            for _ in range(30):
                mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
                logits, past = model(tokens[-1][:, None], past=past, attention_mask=mask)
                tokens.append(logits[:, -1].argmax(-1))
    # Every token that came out before is the right one, and none came after the window began to slide.
    assert 2 < len(tokens) <= 24 - 10 + 1
    assert torch.equal(torch.stack(tokens, dim=1), expected.tokens[:, : len(tokens)])


def test_a_bias_in_an_additive_mask_equals_plain_decoding() -> None:
    class Biased(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) - 0.5 * torch.arange(k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)

    model = Biased(TinyConfig())
    input_ids, mask = prompt()
    plain = generate(model, input_ids, 20, mask)
    assert torch.equal(generate(compiled(model), input_ids, 20, mask).tokens, plain.tokens)


def test_a_bias_that_is_written_in_place_equals_plain_decoding() -> None:
    class InPlace(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.zeros(q.shape[1], q.shape[2], k.shape[2])
            bias[1:, :, :] = -0.3 * torch.arange(k.shape[2])
            bias = bias + torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)

    model = InPlace(TinyConfig())
    input_ids, mask = prompt()
    plain = generate(model, input_ids, 20, mask)
    assert torch.equal(generate(compiled(model), input_ids, 20, mask).tokens, plain.tokens)


def test_a_bias_that_is_not_finite_is_refused() -> None:
    class Infinite(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            bias = torch.zeros(mask.shape).masked_fill(torch.arange(k.shape[2]) == 3, torch.inf)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale, enable_gqa=True)

    with pytest.raises(specache_fx.UnsupportedGraphError, match="neither finite nor -inf"), torch.no_grad():
        compiled(Infinite(TinyConfig()))(prompt()[0])


def test_an_additive_mask_that_hides_from_some_heads_only_is_refused() -> None:
    class PerHead(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            hidden = torch.arange(k.shape[2]) < torch.arange(q.shape[1])[:, None, None]
            added = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).expand(-1, q.shape[2], -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=self.scale, enable_gqa=True)

    with pytest.raises(specache_fx.UnsupportedGraphError, match="some heads only"), torch.no_grad():
        compiled(PerHead(TinyConfig()))(prompt()[0])


def test_an_additive_padding_mask_equals_plain_decoding() -> None:
    class Additive(TinyDecoder):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=self.scale, enable_gqa=True)

    model = Additive(TinyConfig())
    input_ids, mask = prompt()
    plain = generate(model, input_ids, 20, mask)
    assert torch.equal(generate(compiled(model), input_ids, 20, mask).tokens, plain.tokens)


def test_a_mask_of_floats_equals_plain_decoding() -> None:
    class Floats(TinyDecoder):
        def forward(self, *args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
            return super().forward(*args, attention_mask=attention_mask.bool(), **kwargs)

    model = Floats(TinyConfig())
    input_ids, mask = prompt()

    def run(forward: Any) -> Tensor:
        keys, tokens = mask.float(), []
        with torch.no_grad():
            logits, past = forward(input_ids, attention_mask=keys)
            for _ in range(20):
                tokens.append(logits[:, -1].argmax(-1, keepdim=True))
                keys = torch.cat([keys, keys.new_ones(2, 1)], dim=1)
                logits, past = forward(tokens[-1], past=past, attention_mask=keys)
        return torch.cat(tokens, dim=1)

    expected = run(model)
    assert torch.equal(run(compiled(model)), expected)
