"""Layouts of caches: each is rewritten, and handed out, cropped, saved and given back as the model has it."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from torch import Tensor, nn

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, DIM, TOKENS = 4, 8, 97
KINDS = [
    "tokens first",
    "sequence first",
    "returned permuted",
    "keys transposed",
    "keys transposed for SDPA",
]
PAIRS = ("pair first", "pair behind tokens", "pair of projections")
KINDS += PAIRS
# Of each kind: the dimensions that keys have outside, `[batch, heads, tokens, channels]` within. None is a pair's.
ORDERS = {
    "tokens first": (0, 2, 1, 3),
    "sequence first": (2, 0, 1, 3),
    "returned permuted": (2, 0, 1, 3),
    "keys transposed": (0, 1, 3, 2),
    "keys transposed for SDPA": (0, 1, 3, 2),
    "pair first": (None, 0, 1, 2, 3),
    "pair behind tokens": (0, 2, None, 1, 3),
    "pair of projections": (0, None, 2, 1),
}
PERMUTED_MOST = ("sequence first", "keys transposed", *PAIRS[1:])
OPTIONS: dict[str, Any] = {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4, "lowering": "eager"}


class Decoder(nn.Module):
    """Two layers of attention, whose cache has a layout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, width = kind, HEADS * DIM
        self.num_kv_heads = HEADS if "keys" in kind else 2
        kv_width = self.num_kv_heads * DIM
        self.table, self.places = nn.Embedding(TOKENS, width), nn.Embedding(128, width)
        self.qkv = nn.ModuleList(nn.Linear(width, width + 2 * kv_width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.widths = [width, kv_width, kv_width]

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        tokens_at = ORDERS[self.kind].index(2)
        start = 0 if past is None else past[0][0].shape[tokens_at]
        x = self.table(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        presents = []
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (side.unflatten(-1, (-1, DIM)) for side in qkv(x).split(self.widths, -1))
            attend = getattr(self, "_" + self.kind.removesuffix(" for SDPA").replace(" ", "_"))
            heads, present = attend(q, k, v, None if past is None else past[i])
            presents.append(present)
            x = x + out(heads.transpose(1, 2).flatten(2))
        return F.linear(x, self.table.weight), presents

    def _tokens_first(self, q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        return self._sdpa(q, k.transpose(1, 2), v.transpose(1, 2)), (k, v)

    def _sequence_first(self, q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if past is not None:
            k, v = torch.cat([past[0], k], 0), torch.cat([past[1], v], 0)
        whole = [
            side.unsqueeze(-2).expand(-1, -1, -1, 2, -1).reshape(*side.shape[:2], HEADS, DIM)
            for side in (k, v)
        ]
        return self._sdpa(q, *(side.permute(1, 2, 0, 3) for side in whole)), (k, v)

    def _returned_permuted(self, q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            before = [side.permute(1, 2, 0, 3) for side in past]
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        return self._sdpa(q, k, v), (k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3))

    def _keys_transposed(self, q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        q, k, v = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 3), torch.cat([past[1], v], 2)
        if "SDPA" in self.kind:
            return self._sdpa(q.transpose(1, 2), k.transpose(2, 3), v), (k, v)
        scores = q @ k * DIM**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[3] - q.shape[2] + 1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v, (k, v)

    def _pair(self, k: Tensor, v: Tensor, past: Any, dim: int, tokens: int) -> Tensor:
        pair = torch.stack([k, v], dim)
        return pair if past is None else torch.cat([past[0], pair], tokens)

    def _pair_first(self, q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        pair = self._pair(k.transpose(1, 2), v.transpose(1, 2), past, 0, 3)
        return self._sdpa(q, *pair.unbind(0)), (pair,)

    def _pair_behind_tokens(self, q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        pair = self._pair(k, v, past, 2, 1)
        return self._sdpa(q, pair[:, :, 0].transpose(1, 2), pair[:, :, 1].transpose(1, 2)), (pair,)

    def _pair_of_projections(self, q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        pair = self._pair(k.flatten(2), v.flatten(2), past, 1, 2)
        whole = [side.unflatten(-1, (-1, DIM)).transpose(1, 2) for side in pair.unbind(1)]
        return self._sdpa(q, *whole), (pair,)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_causal = q.shape[1] > 1
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=is_causal, enable_gqa=True)


def both(kind: str, **options: Any) -> tuple[Decoder, Any]:
    torch.manual_seed(0)
    model = Decoder(kind).eval()
    return model, torch.compile(copy.deepcopy(model), backend="specache", options=OPTIONS | options)


def decode(model: Any, past: Any, token: Tensor, count: int) -> tuple[Tensor, Any]:
    logits = []
    with torch.no_grad():
        for _ in range(count):
            out, past = model(token, past)
            token = out[:, -1:].argmax(-1)
            logits.append(out[:, -1])
    return torch.stack(logits), past


def prompt(batch: int, length: int = 5) -> Tensor:
    return torch.randint(TOKENS, (batch, length), generator=torch.Generator().manual_seed(batch))


def cropped(past: Any, kind: str) -> Any:
    """The cache without its newest 3 tokens."""
    at = [ORDERS[kind].index(2), 2 if "keys" in kind else ORDERS[kind].index(2)][: len(past[0])]
    return [
        tuple(t.narrow(dim, 0, t.shape[dim] - 3) for t, dim in zip(pair, at, strict=True)) for pair in past
    ]


@pytest.mark.parametrize("batch", nightly_unless((2).__eq__, [1, 2]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_is_rewritten_and_equals_plain_decoding(kind: str, batch: int) -> None:
    model, ours = both(kind, strict=True)
    for _ in range(2):
        expected, past = decode(model, None, prompt(batch), 40)
        logits, our_past = decode(ours, None, prompt(batch), 40)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert [t.shape for pair in our_past for t in pair] == [t.shape for pair in past for t in pair]
    assert specache_fx.stats(our_past).steps == 39


@pytest.mark.parametrize("kind", nightly_unless(PERMUTED_MOST.__contains__, KINDS))
def test_caches_are_cropped_copied_and_reordered_in_their_layout(kind: str) -> None:
    model, ours = both(kind)
    rows_at = ORDERS[kind].index(0)

    def reordered(past: Any) -> Any:
        return [tuple(t.index_select(rows_at, torch.tensor([1, 1])) for t in pair) for pair in past]

    for edit in (lambda past: cropped(past, kind), copy.deepcopy, reordered):
        _, past = decode(model, None, prompt(2), 6)
        _, our_past = decode(ours, None, prompt(2), 6)
        expected, _ = decode(model, edit(past), prompt(2, 1), 8)
        logits, _ = decode(ours, edit(our_past), prompt(2, 1), 8)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(  # as many tokens as rows, heads or channels
    ("kind", "length"),
    nightly_unless(
        lambda case: case[0] in PERMUTED_MOST and case[1] in (2, DIM),
        itertools.product(KINDS, (2, HEADS, DIM, 11)),
    ),
)
def test_a_graph_that_is_left_alone_gets_the_layout_of_the_model(kind: str, length: int) -> None:
    model, ours = both(kind)
    with torch.no_grad():
        _, past = model(prompt(2, length))
        _, our_past = ours(prompt(2, length))
    expected, past = model(prompt(2, 1), past)  # with gradients
    logits, our_past = ours(prompt(2, 1), copy.deepcopy(our_past))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for pair, our_pair in zip(past, our_past, strict=True):
        for side, our_side in zip(pair, our_pair, strict=True):
            torch.testing.assert_close(our_side, side, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", nightly_unless(PERMUTED_MOST.__contains__, KINDS))
def test_a_saved_cache_has_the_layout_of_the_model(kind: str, tmp_path: Path) -> None:
    _, ours = both(kind)
    _, whole = decode(ours, None, prompt(2), 6)
    past = cropped(whole, kind)  # a copy is saved
    specache_fx.save(past, tmp_path / "cache")
    loaded = specache_fx.load(ours, tmp_path / "cache")
    assert [t.shape for pair in loaded for t in pair] == [t.shape for pair in past for t in pair]
    expected, _ = decode(ours, past, prompt(2, 1), 6)
    logits, _ = decode(ours, loaded, prompt(2, 1), 6)
    torch.testing.assert_close(logits, expected)
