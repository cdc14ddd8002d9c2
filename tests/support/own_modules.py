"""Decoders as people write them for themselves: a GPT and a Llama, their past KV in whatever they like to keep it in.

`forward(ids, mask, *cache)` returns `(logits, *cache)`, where `cache` is one container or, flat, a tensor for each
layer's keys and values; none at the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

VOCAB_SIZE = 89
Pair = tuple[Tensor, Tensor]
Cache = tuple[Any, ...]
RepeatKV = Literal["sdpa", "interleave", "expand"]
Layout = Literal["heads first", "tokens first", "heads merged", "one tensor a layer", "one tensor"]


@dataclass
class KVCache:
    """A container of one's own."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass
class RegisteredCache:
    """The same, known to pytree: Dynamo takes it apart by itself."""

    keys: list[Tensor]
    values: list[Tensor]


pytree.register_dataclass(RegisteredCache)


class Container(NamedTuple):
    """How a cache is handed over: `pack` makes what `forward` returns behind the logits, `unpack` reads it."""

    pack: Callable[[Sequence[Pair]], Cache]
    unpack: Callable[..., Sequence[Pair]]


CONTAINERS = {
    "tuples": Container(lambda pairs: (tuple(pairs),), lambda cache: cache),
    "lists": Container(lambda pairs: ([list(pair) for pair in pairs],), lambda cache: cache),
    "dicts": Container(
        lambda pairs: ({f"layer{i}": {"k": k, "v": v} for i, (k, v) in enumerate(pairs)},),
        lambda cache: [(layer["k"], layer["v"]) for layer in cache.values()],
    ),
    "dataclass": Container(
        lambda pairs: (KVCache([k for k, _ in pairs], [v for _, v in pairs]),),
        lambda cache: list(zip(cache.keys, cache.values, strict=True)),
    ),
    "pytree": Container(
        lambda pairs: (RegisteredCache([k for k, _ in pairs], [v for _, v in pairs]),),
        lambda cache: list(zip(cache.keys, cache.values, strict=True)),
    ),
    "flat": Container(
        lambda pairs: tuple(side for pair in pairs for side in pair),
        lambda *cache: list(zip(cache[::2], cache[1::2], strict=True)),
    ),
}


@dataclass(frozen=True)
class OwnConfig:
    """Shape of an `OwnDecoder`; a GPT has as many kv heads as heads, learned positions and biases."""

    kind: Literal["gpt", "llama"] = "llama"
    container: str = "tuples"
    layout: Layout = "heads first"
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    repeat_kv: RepeatKV = "sdpa"
    odd_scores: bool = False  # attention that can't be rewritten; needs a mask

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def apply_rotary(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate `[batch, heads, q_len, head_dim]` in pairs, as complex numbers do."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = position_ids[:, None, :, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.config = config
        bias = config.kind == "gpt"
        kv_width = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.width, config.width, bias=bias)
        self.wk, self.wv = (nn.Linear(config.width, kv_width, bias=bias) for _ in range(2))
        self.wo = nn.Linear(config.width, config.width, bias=bias)

    def forward(
        self, x: Tensor, position_ids: Tensor, past: Pair | None, mask: Tensor | None
    ) -> tuple[Tensor, Pair]:
        q, k, v = (
            linear(x).unflatten(2, (-1, self.config.head_dim)) for linear in (self.wq, self.wk, self.wv)
        )
        if self.tokens_first:  # cached as [batch, kv_len, num_kv_heads, head_dim], or with heads merged
            if self.config.kind == "llama":
                q, k = (apply_rotary(side.transpose(1, 2), position_ids).transpose(1, 2) for side in (q, k))
            k, v = present = self.appended(k, v, past)
            if self.config.layout == "heads merged":
                k, v = (side.unflatten(2, (-1, self.config.head_dim)) for side in present)
            k, v = self.repeat_kv(k), self.repeat_kv(v)
            q, k, v = (side.transpose(1, 2) for side in (q, k, v))
        else:
            q, k, v = (side.transpose(1, 2) for side in (q, k, v))
            if self.config.kind == "llama":
                q, k = apply_rotary(q, position_ids), apply_rotary(k, position_ids)
            if past is not None:
                k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
            present = k, v
        if self.config.odd_scores:
            scores = (q @ k.mT * self.config.head_dim**-0.5).relu()
            return self.wo(
                (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
            ), present
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and x.shape[1] > 1,
            enable_gqa=k.shape[1] < q.shape[1],
        )
        return self.wo(y.transpose(1, 2).flatten(2)), present

    @property
    def tokens_first(self) -> bool:
        return self.config.layout in ("tokens first", "heads merged")

    def appended(self, k: Tensor, v: Tensor, past: Pair | None) -> Pair:
        """The cache with this call's `[batch, q_len, num_kv_heads, head_dim]`, tokens first."""
        if self.config.layout == "heads merged":
            k, v = k.flatten(2), v.flatten(2)
        return (k, v) if past is None else (torch.cat((past[0], k), dim=1), torch.cat((past[1], v), dim=1))

    def repeat_kv(self, x: Tensor) -> Tensor:
        """`[batch, kv_len, num_kv_heads, head_dim]` with the query's heads, where that is not left to SDPA."""
        groups = self.config.num_heads // self.config.num_kv_heads
        if self.config.repeat_kv == "interleave":
            return x.repeat_interleave(groups, dim=2)
        if self.config.repeat_kv == "expand":
            return x[:, :, :, None, :].expand(-1, -1, -1, groups, -1).flatten(2, 3)
        return x


class OwnDecoder(nn.Module):
    """Embedding, layers, norm and head; random weights that are wide enough for peaked attention."""

    def __init__(self, config: OwnConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        norm = nn.LayerNorm if config.kind == "gpt" else RMSNorm
        self.embed = nn.Embedding(VOCAB_SIZE, config.width)
        self.position_embed = nn.Embedding(128, config.width) if config.kind == "gpt" else None
        self.norms = nn.ModuleList(norm(config.width) for _ in range(2 * config.num_layers + 1))
        self.attentions = nn.ModuleList(Attention(config) for _ in range(config.num_layers))
        self.mlps = nn.ModuleList(
            SwiGLU(config.width)
            if config.kind == "llama"
            else nn.Sequential(
                nn.Linear(config.width, config.width), nn.GELU(), nn.Linear(config.width, config.width)
            )
            for _ in range(config.num_layers)
        )
        self.head = nn.Linear(config.width, VOCAB_SIZE, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                gain = 2.0 if "wq" in name or "wk" in name else 1.0
                std = 1.0 if "embed" in name else gain * weight.shape[1] ** -0.5
                weight.data.normal_(std=std, generator=generator)
            elif "norm" not in name:
                weight.data.normal_(std=0.1, generator=generator)
        self.eval().requires_grad_(False)

    def pairs(self, cache: Cache) -> Sequence[Pair]:
        """A pair a layer out of what `forward` was given."""
        if self.config.layout == "one tensor":  # [num_layers, 2, batch, num_kv_heads, kv_len, head_dim]
            return [(layer[0], layer[1]) for layer in cache[0]]
        if self.config.layout == "one tensor a layer":  # [2, batch, num_kv_heads, kv_len, head_dim]
            return [(layer[0], layer[1]) for layer in cache]
        return CONTAINERS[self.config.container].unpack(*cache)

    def cache(self, pairs: Sequence[Pair]) -> Cache:
        """What `forward` returns behind the logits."""
        if self.config.layout in ("one tensor", "one tensor a layer"):
            layers = [torch.stack(pair) for pair in pairs]
            return (torch.stack(layers),) if self.config.layout == "one tensor" else tuple(layers)
        return CONTAINERS[self.config.container].pack(pairs)

    def forward(self, ids: Tensor, mask: Tensor | None, *cache: Any) -> tuple[Any, ...]:
        """One call.

        Args:
            ids: Tokens, int64 `[batch, q_len]`.
            mask: False where a token is padding, bool `[batch, kv_len]`; None where there is none.
            *cache: What the last call returned behind the logits; nothing at the prompt.
        """
        pairs = self.pairs(cache) if cache else None
        q_len = ids.shape[1]
        past_len = 0 if pairs is None else pairs[0][0].shape[1 if self.attentions[0].tokens_first else 2]
        seen = None
        if mask is None:
            position_ids = torch.arange(past_len, past_len + q_len, device=ids.device)[None]
        else:
            position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -q_len:]
            causal = torch.ones(q_len, past_len + q_len, dtype=torch.bool, device=ids.device).tril(past_len)
            seen = causal & mask[:, None, None, :]
        x = self.embed(ids)
        if self.position_embed is not None:
            x = x + self.position_embed(position_ids)
        presents: list[Pair] = []
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            y, present = attention(self.norms[2 * i](x), position_ids, pairs[i] if pairs else None, seen)
            presents.append(present)
            x = x + y
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x)), *self.cache(presents)


class Run(NamedTuple):
    """Greedy output: tokens int64 `[batch, num_tokens]`, logits of each, and the last cache."""

    tokens: Tensor
    logits: Tensor
    cache: Cache


@torch.no_grad()
def greedy(
    model: Callable[..., tuple[Any, ...]], padded: bool, num_tokens: int = 24, prompt: int = 13
) -> Run:
    """Decode two rows; `padded` gives a mask, and the second row five tokens of padding on the left."""
    ids = torch.randint(VOCAB_SIZE, (2, prompt), generator=torch.Generator().manual_seed(1))
    mask = None
    if padded:
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, :5] = False
    logits, *cache = model(ids, mask)
    found = [logits[:, -1]]
    for _ in range(num_tokens - 1):
        mask = None if mask is None else torch.cat((mask, mask.new_ones(2, 1)), dim=1)
        logits, *cache = model(found[-1].argmax(-1, keepdim=True), mask, *cache)
        found.append(logits[:, -1])
    stacked = torch.stack(found, dim=1)
    return Run(stacked.argmax(-1), stacked, tuple(cache))
