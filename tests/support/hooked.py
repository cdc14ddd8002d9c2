"""A decoder of a layer or two, parts of which a test spells in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HEADS, HEAD_DIM = 89, 2, 16
HIDDEN = HEADS * HEAD_DIM
Pairs = tuple[tuple[Tensor, Tensor], ...]


class Hooked(nn.Module):
    """Positions are added to the embeddings, queries, keys and values come from one projection; no norms, no MLP."""

    num_layers = 1

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(self.num_layers))
        self.table = nn.Parameter(torch.zeros(64, HIDDEN))
        self.register_buffer("rates", torch.arange(1, HIDDEN + 1) * 0.05)
        self.register_buffer("state", torch.ones(1, 1, HIDDEN))
        for parameter in self.parameters():
            parameter.data.normal_(std=0.5, generator=generator)
        self.eval().requires_grad_(False)

    def positions(self, ids: Tensor, start: int) -> Tensor:
        """What is added to the embeddings: `[batch or 1, q_len, hidden]`."""
        place = torch.arange(start, start + ids.shape[1])
        return torch.sin(place[:, None].float() * self.rates)[None]

    def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
        """Between the embeddings and the first layer."""
        return x

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hide)

    def append(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([past, new], 2)

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        sides = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (side.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for side in sides)
        if past is not None:
            k, v = self.append(past[0], k), self.append(past[1], v)
        return x + self.attend(layer, q, k, v, hide).transpose(1, 2).flatten(2), (k, v)

    def forward(self, ids: Tensor, past: Pairs | None = None, *more: Tensor) -> tuple[Any, ...]:
        start = 0 if past is None else past[0][0].shape[2]
        x = self.hidden(self.embed(ids) + self.positions(ids, start), *more)
        place = torch.arange(start + ids.shape[1])
        hide = place[start:, None] - place[None] < 0
        new = []
        for layer in range(self.num_layers):
            x, pair = self.run_layer(layer, x, hide, None if past is None else past[layer])
            new.append(pair)
        return self.head(x), tuple(new)


class AssertsOfPositions(Hooked):
    """Has positions for 16 tokens. Not in a test's file, where pytest rewrites assertions."""

    def positions(self, ids: Tensor, start: int) -> Tensor:
        place = torch.arange(start, start + ids.shape[1])
        assert (place < 16).all(), "no position"
        return torch.sin(place[:, None].float() * self.rates)[None]


class AssertsOfNumbers(Hooked):
    def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
        assert x.isfinite().all(), "no number"
        return x


class SpeltOut(Hooked):
    """Attention as products and a softmax."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(hide, -1e30)
        return scores.softmax(-1) @ v


@torch.no_grad()
def logits(
    model: Callable[..., Any], more: Callable[[int], tuple[Tensor, ...]] = lambda q_len: (), steps: int = 10
) -> Tensor:
    """`[1 + steps, batch, vocabulary]` of a prompt and tokens that are given.

    Args:
        model: The model, compiled or not.
        more: Further inputs for that many tokens.
        steps: Tokens after the prompt.
    """
    ids = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))
    out, past, *_ = model(ids, None, *more(10))
    found = [out[:, -1]]
    for i in range(steps):
        out, past, *_ = model(torch.tensor([[3 + i], [7 + i]]), past, *more(1))
        found.append(out[:, -1])
    return torch.stack(found)
