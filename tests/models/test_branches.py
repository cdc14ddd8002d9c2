"""Past KV as a value: branches, crops and copies are followed or refused, never mixed up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.models import KVPairs, TinyConfig, TinyDecoder
from support.zoo import TWO_LANES
from torch import Tensor

import specache_fx

OPTIONS = TWO_LANES | {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4}
PROMPT = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
A, B, C = (torch.tensor([[i], [i + 1]]) for i in (5, 17, 40))


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    torch._dynamo.reset()
    plain = TinyDecoder(TinyConfig(num_layers=1))
    return plain, torch.compile(plain, backend="specache", options=OPTIONS)


@torch.no_grad()
def feed(model: Any, past: KVPairs | None, token: Tensor) -> tuple[Tensor, KVPairs]:
    kv_len = (0 if past is None else past[0][0].shape[2]) + token.shape[1]
    return model(token, past=past, attention_mask=torch.ones(2, kv_len, dtype=torch.bool))


def test_branches_of_one_prompt_each_see_their_own_history(models: tuple[Any, Any]) -> None:
    plain, ours = models
    _, trunk = feed(plain, None, PROMPT)
    _, our_trunk = feed(ours, None, PROMPT)
    for token in (A, B, C, A):  # the prompt's cache may be gone on from as often as one likes
        torch.testing.assert_close(
            feed(ours, our_trunk, token)[0], feed(plain, trunk, token)[0], rtol=1e-4, atol=1e-4
        )


def test_a_branch_that_was_left_is_refused(models: tuple[Any, Any]) -> None:
    _, ours = models
    _, trunk = feed(ours, None, PROMPT)
    _, first = feed(ours, trunk, A)
    _, second = feed(ours, trunk, B)
    with pytest.raises(specache_fx.CacheHandleError, match="branch that was left"):
        feed(ours, first, C)
    feed(ours, second, C)  # the branch that was taken goes on


def test_fewer_batch_rows_are_refused(models: tuple[Any, Any]) -> None:
    _, ours = models
    _, past = feed(ours, None, PROMPT)
    _, past = feed(ours, past, A)
    cut = [(k[:1], v[:1]) for k, v in past]
    with pytest.raises(specache_fx.CacheHandleError, match="has 1 of its 2 batch rows"), torch.no_grad():
        ours(A[:1], past=cut, attention_mask=torch.ones(1, 22, dtype=torch.bool))


NOTHING = PROMPT[:, :0]


class OfAnySize(torch.nn.Module):
    """One attention, whose views have no size that is to be found (-1): they hold for no elements as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(61, 64)

    def forward(
        self, ids: Tensor, past: KVPairs | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, KVPairs]:
        batch, q_len = ids.shape
        query = self.embedding(ids).view(batch, q_len, 2, 32).transpose(1, 2)
        key, value = query.sin(), query.cos()
        if past is not None:
            key, value = torch.cat([past[0][0], key], 2), torch.cat([past[0][1], value], 2)
        kv_len = key.shape[2]
        seen = torch.arange(kv_len)[None] <= torch.arange(kv_len - q_len, kv_len)[:, None]
        out = self.attend(query, key, value, seen)
        return out.transpose(1, 2).reshape(batch, q_len, 64) @ self.embedding.weight.T, [(key, value)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)


class SpeltOut(OfAnySize):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = (query @ key.mT * 32**-0.5).masked_fill(~seen, -1e30)
        return scores.softmax(-1) @ value


class WithSinks(OfAnySize):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0]))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = (query @ key.mT * 32**-0.5).masked_fill(~seen, -1e30)
        scores = torch.cat([scores, self.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1] @ value


@torch.no_grad()
def fed(model: Any, parts: list[Tensor]) -> list[Tensor]:
    past, logits = None, []
    for tokens in parts:
        kv_len = (0 if past is None else past[-1][0].shape[2]) + tokens.shape[1]
        mask = torch.ones(len(tokens), kv_len, dtype=torch.bool)
        out, past = model(tokens, past=past, attention_mask=mask)
        logits.append(out)
    return logits


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "parts",
    [
        [NOTHING, PROMPT, A, B],
        [NOTHING, A, NOTHING, B],
        [PROMPT, NOTHING, A, NOTHING, B, C],
        [PROMPT[:0], A[:0], PROMPT[:0]],
    ],
    ids=["prompt", "prompt-then-one", "turns", "rows"],
)
@pytest.mark.parametrize("kind", [OfAnySize, SpeltOut, WithSinks])
def test_calls_without_tokens_or_sequences_are_the_models_own(
    kind: type[OfAnySize], parts: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """They are left alone, and the next call takes the cache over."""
    plain = kind()
    ours = torch.compile(plain, backend="specache", options=OPTIONS)
    with caplog.at_level("WARNING", logger="specache_fx"):
        for found, expected in zip(fed(ours, parts), fed(plain, parts), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    reason = "is left alone: this call has no tokens or no sequences. Make no call without tokens."
    assert caplog.messages and all(reason in message for message in caplog.messages)


class Counting(TinyDecoder):
    """A state of its own that every call moves on, as recurrent layers have."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def embed_inputs(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        hidden, rotary = super().embed_inputs(input_ids, position_ids)
        self.calls += 1
        return hidden * (1 + 0.1 * self.calls), rotary


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("lookahead", ["token", "query", "none"])
def test_a_model_with_a_state_of_its_own_moves_it_once_a_token(lookahead: str) -> None:
    plain = Counting(TinyConfig(num_layers=1))
    model = copy.deepcopy(plain)
    ours = torch.compile(model, backend="specache", options={**OPTIONS, "lookahead": lookahead})
    logits, past = feed(plain, None, PROMPT)
    _, our_past = feed(ours, None, PROMPT)
    for token in (A, B, C, A, B, C):
        logits, past = feed(plain, past, token)
        our_logits, our_past = feed(ours, our_past, token)
        torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.calls, plain.calls)
