"""Graphs in which one attention is rewritten and another is left alone, and calls that must not change a session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from support.zoo import TWO_LANES
from torch import Tensor

import specache_fx
from specache_fx.runtime.session import registry

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS = TWO_LANES | {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4}
PROMPT = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))


class HalfEager(TinyDecoder):
    """The second layer takes the square roots of its weights: no attention in normal form."""

    is_first = False

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        self.is_first = not self.is_first
        if self.is_first:  # from the next call on
            return super().sdpa(q, k, v, mask)
        groups = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1).sqrt() @ v


def test_a_graph_may_be_rewritten_in_part(caplog: pytest.LogCaptureFixture) -> None:
    model = HalfEager(TinyConfig())
    plain = generate(model, PROMPT, 10)
    compiled = torch.compile(model, backend="specache", options=OPTIONS)
    ours = generate(compiled, PROMPT, 10)
    assert torch.equal(ours.tokens, plain.tokens)
    assert registry.find(ours.past[0][0]) is not None
    assert registry.find(ours.past[1][0]) is None  # a real cache, as the layer expects it
    torch.testing.assert_close(ours.past[1][0], plain.past[1][0], rtol=1e-4, atol=1e-4)
    # One lane: the second would not see the first one's pair there. Each length is a graph of its own.
    assert "stays in the graph" in caplog.text and "compiled for 8 shapes" in caplog.text
    # A handle in the place of a real cache is refused.
    swapped = [ours.past[0], tuple(side.clone() for side in ours.past[0])]
    mask = torch.cat([ours.attention_mask, ours.attention_mask.new_ones(2, 1)], dim=1)
    with pytest.raises(specache_fx.CacheHandleError, match="did not rewrite"), torch.no_grad():
        compiled(ours.tokens[:, -1:], past=swapped, attention_mask=mask)


def test_a_call_of_another_model_leaves_the_session_as_it_was() -> None:
    models = [TinyDecoder(TinyConfig(num_layers=1, seed=seed)) for seed in range(2)]
    plain = generate(models[0], PROMPT, 12)
    first = torch.compile(models[0], backend="specache", options=OPTIONS)
    other = torch.compile(models[1], backend="specache", options={**OPTIONS, "top_k": 8})
    generate(other, PROMPT, 4)
    ours = generate(first, PROMPT, 8)
    cropped = [(k[:, :, :10], v[:, :, :10]) for k, v in ours.past]
    with pytest.raises(specache_fx.CacheHandleError, match="was made with"), torch.no_grad():
        other(PROMPT[:, :1], past=cropped, attention_mask=torch.ones(2, 11, dtype=torch.bool))
    # Nothing was cut: the generation goes on where it was.
    past, token, mask, tokens = ours.past, ours.tokens[:, -1:], ours.attention_mask, []
    with torch.no_grad():
        for _ in range(4):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            logits, past = first(token, past=past, attention_mask=mask)
            token = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
    assert torch.equal(torch.cat(tokens, dim=1), plain.tokens[:, 8:])


class GatedByPosition(TinyDecoder):
    """A factor on the embeddings that is made from the positions, and then written into with data."""

    def embed_inputs(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Any]:
        hidden, rotary = super().embed_inputs(input_ids, position_ids)
        factor = torch.ones_like(position_ids, dtype=hidden.dtype) + 0.1 * position_ids.cos()
        factor[:] += hidden.mean(-1).sigmoid()
        return hidden * factor[..., None], rotary


def test_data_that_is_written_into_a_tensor_of_positions_stays_in_the_graph() -> None:
    model = GatedByPosition(TinyConfig(num_layers=1))
    plain = generate(model, PROMPT, 24)
    ours = generate(torch.compile(model, backend="specache", options=OPTIONS), PROMPT, 24)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)
    session = session_of(ours.past)
    assert session.metrics.hits.token_hits == session.metrics.hits.token_checks


class TwoCaches(TinyDecoder):
    """The second layer's cache begins with other tokens of the prompt than the first one's."""

    kept = slice(-4, None)

    def forward(self, input_ids: Tensor, past: Any = None, **_: Any) -> Any:
        hidden, rotary = self.embed_inputs(input_ids, torch.arange(input_ids.shape[1])[None])
        presents = []
        for layer, block in enumerate(self.blocks):
            q, k, v = block.qkv(hidden, rotary)  # type: ignore[operator]
            if past is not None:
                k, v = (torch.cat((old, new), dim=-2) for old, new in zip(past[layer], (k, v), strict=True))
            elif layer == 1:
                k, v = k[:, :, self.kept], v[:, :, self.kept]
            presents.append((k, v))
            groups = self.config.num_heads // self.config.num_kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            hidden = block.finish(hidden, torch.nn.functional.scaled_dot_product_attention(q, k, v))  # type: ignore[operator]
        return self.head(self.norm(hidden)), presents


@torch.no_grad()
def test_caches_of_different_tokens_are_not_taken_for_one() -> None:
    plain = TwoCaches(TinyConfig())
    compiled = torch.compile(plain, backend="specache", options=OPTIONS)
    mine, theirs = compiled(PROMPT), plain(PROMPT)
    for token in range(5):
        step = torch.full((2, 1), token)
        mine, theirs = compiled(step, mine[1]), plain(step, theirs[1])
        torch.testing.assert_close(mine[0], theirs[0], rtol=2e-4, atol=2e-4)
    assert [k.shape for k, _ in mine[1]] == [k.shape for k, _ in theirs[1]]


class Swapped(TinyDecoder):
    """A second attention over the same cache reads keys as values and values as keys."""

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return super().sdpa(q, k, v, mask) + super().sdpa(q, v, k, mask)


def test_keys_that_are_read_as_values_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Swapped(TinyConfig(num_layers=1))
    plain = generate(model, PROMPT, 20)
    ours = generate(torch.compile(model, backend="specache", options=OPTIONS), PROMPT, 20)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)
    assert "is left alone" in caplog.text


class LengthScaled(TinyDecoder):
    """Queries grow with the length, as a Python number."""

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return super().sdpa(q * (k.shape[2] / 20), k, v, mask)


def test_a_length_as_a_python_number_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = LengthScaled(TinyConfig(num_layers=1))
    plain = generate(model, PROMPT, 20)
    ours = generate(torch.compile(model, backend="specache", options=OPTIONS), PROMPT, 20)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)
    assert "q * (k.shape[2] / 20)" in caplog.text and "Make it a tensor" in caplog.text


class ScaledByLength(TinyDecoder):
    """The scale shrinks with the length, as a Python number."""

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        groups = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2) * (k.shape[2] ** -0.5)).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v


def test_a_scale_that_is_computed_from_a_size_is_not_made_a_constant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A guard on it would compile each step anew."""
    model, stats = ScaledByLength(TinyConfig(num_layers=1)), torch._dynamo.utils.counters["stats"]
    plain, before = generate(model, PROMPT, 20), stats["unique_graphs"]
    ours = generate(torch.compile(model, backend="specache", options=OPTIONS), PROMPT, 20)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)
    assert "is left alone" in caplog.text
    assert stats["unique_graphs"] - before <= 3
