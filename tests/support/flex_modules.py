"""Decoders that attend by `flex_attention` over a growing cache, each with mods of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.own_modules import Attention, OwnConfig, OwnDecoder, Pair, apply_rotary
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention


def one_block(q: Tensor, k: Tensor, mask_mod: Any) -> BlockMask:
    """All keys are in one block, so that `mask_mod` tells which are seen."""
    one, sizes = torch.ones(1, 1, 1, dtype=torch.int32), (q.shape[2], k.shape[2])
    make = partial(BlockMask.from_kv_blocks, seq_lengths=sizes, compute_q_blocks=False)
    return make(one, one[..., None] - 1, mask_mod=mask_mod)


def made_blocks(past: int, q_len: int, kv_len: int) -> BlockMask:
    return create_block_mask(lambda b, h, i, j: i + past >= j, None, None, q_len, kv_len, device="cpu")


class Causal(Attention):
    """Grouped queries with `mask_mod` alone; the others change what it is made of."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        self.register_buffer("table", torch.ones(4, 3))
        self.register_buffer("documents", torch.arange(128).clamp(min=6) // 24)  # a new one at 24 and 48

    def shows(self, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def score(self, score: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score

    def blocks(self, real: Tensor | None, past: int, q: Tensor, k: Tensor) -> BlockMask | None:
        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = self.shows(h, i + past, j)
            return seen if real is None else seen & real[b, j]

        return one_block(q, k, mask_mod)

    def attend(self, past: int, real: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return self.score(score, h, i + past, j)

        blocks = self.blocks(real, past, q, k)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True)

    def forward(
        self, x: Tensor, place: Tensor, past: Pair | None, mask: Tensor | None
    ) -> tuple[Tensor, Pair]:
        sides = (linear(x).unflatten(2, (-1, 8)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv))
        q, k, v = sides
        q, k, start = apply_rotary(q, place), apply_rotary(k, place), 0
        if past is not None:
            start = past[0].shape[2]
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        y = self.attend(start, None if mask is None else mask[:, 0, -1], q, k, v)
        return self.wo(y.transpose(1, 2).flatten(2)), (k, v)


def kind(name: str, **parts: Callable[..., Any]) -> type[Causal]:
    return type(name, (Causal,), parts)


Window = kind("Window", shows=lambda self, h, i, j: (i >= j) & (i - j < 11))
Documents = kind("Documents", shows=lambda self, h, i, j: (i >= j) & (self.documents[i] == self.documents[j]))
MadeBlocks = kind(
    "MadeBlocks", blocks=lambda self, real, past, q, k: made_blocks(past, q.shape[2], k.shape[2])
)
Softcap = kind("Softcap", score=lambda self, score, h, i, j: 2.0 * torch.tanh(score / 2.0))
Alibi = kind(  # the causal mask is in `score_mod`, and padding alone in `mask_mod`
    "Alibi",
    score=lambda self, score, h, i, j: torch.where(i >= j, score + self.slopes[h] * (j - i), -math.inf),
    blocks=lambda self, real, past, q, k: (
        real if real is None else one_block(q, k, lambda b, h, i, j: real[b, j])
    ),
)
Sine = kind("Sine", score=lambda self, score, h, i, j: torch.sin(score))
SumOfRow = kind("SumOfRow", score=lambda self, score, h, i, j: score + self.table[h].sum())
OtherKeysByHead = kind("OtherKeysByHead", shows=lambda self, h, i, j: (i >= j) & (i - j < 8 + h))
BlocksAlone = kind("BlocksAlone", blocks=lambda self, real, past, q, k: one_block(q, k, None))


class ReadsItsSums(Causal):
    def attend(self, past: int, real: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks, more = self.blocks(real, past, q, k), AuxRequest(lse=True)
        out, aux = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, return_aux=more)
        return out * aux.lse.sigmoid()[..., None]


def decoder(*kinds: type[Causal]) -> OwnDecoder:
    model = OwnDecoder(OwnConfig(num_layers=len(kinds)))
    for i, each in enumerate(kinds):
        attention = each(model.config).requires_grad_(False)
        attention.load_state_dict(model.attentions[i].state_dict(), strict=False)
        model.attentions[i] = attention
    return model
