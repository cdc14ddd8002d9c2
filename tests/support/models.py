"""A tiny decoder of our own: every knob that changes an attention graph, and nothing else.

`TinyDecoder.forward` is the kind of model the backend is for: past KV tensors go in, present ones come out.
`TinyDecoder.run` is the same network with the attention left open, for the oracle to fill in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

KVPairs = list[tuple[Tensor, Tensor]]
# (layer_idx, q [batch, num_heads, q_len, head_dim], k and v [batch, num_kv_heads, q_len, ...], scale)
#   -> [batch, num_heads, q_len, value_dim]
Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class TinyConfig:
    """Shape of a `TinyDecoder`; `value_dim=None` means `head_dim`, `scale=None` means `head_dim ** -0.5`.

    Layers of `window_layers` attend to the newest `window` tokens and return the newest `window - 1` as their cache.
    Where all layers do, a call with a past needs an `attention_mask`: nothing else tells the length.

    Layers of `local_layers` attend to the newest `local_reach` tokens as well, but keep all as their cache.

    With `only_windows_padded` the `attention_mask` hides keys from `window_layers` alone.

    With `latent_dim` attention is latent (MLA): what is cached has one head, a rotated key of `head_dim // 2` channels
    that all heads share, and a latent that the rest of the keys and the values are projected from in each step.
    """

    vocab_size: int = 61
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int | None = None
    max_positions: int = 512
    positions: Literal["rotary", "learned"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    repeat_kv: Literal["sdpa", "expand"] = "sdpa"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    seed: int = 0
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    latent_dim: int | None = None
    local_reach: int | None = None
    local_layers: tuple[int, ...] = ()
    only_windows_padded: bool = False

    def __post_init__(self) -> None:
        assert self.latent_dim is None or self.num_kv_heads == 1

    @property
    def rotary_dim(self) -> int:
        """Channels of queries and keys that are rotated: half of them where there is a latent."""
        return self.head_dim if self.latent_dim is None else self.head_dim // 2

    def window_of(self, layer_idx: int) -> int | None:
        """Tokens that a query of this layer reaches, its own included; None for all."""
        return self.window if layer_idx in self.window_layers else None


def rotary_tables(position_ids: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin [batch, 1, q_len, head_dim]; the angles are float32 whatever the model's dtype."""
    half = head_dim // 2
    channels = torch.arange(half, device=position_ids.device, dtype=torch.float32)
    angles = position_ids[:, None, :, None].float() * 10000.0 ** (-channels / half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention_mask_4d(key_mask: Tensor | None, batch: int, q_len: int, kv_len: int, device: Any) -> Tensor:
    """Causal and key padding mask, bool [batch, 1, q_len, kv_len], True where a query may look."""
    query_index = torch.arange(q_len, device=device)[:, None] + (kv_len - q_len)
    mask = (torch.arange(kv_len, device=device)[None, :] <= query_index)[None, None]
    if key_mask is not None:
        mask = mask & key_mask.to(torch.bool)[:, None, None, :]
    return mask.expand(batch, 1, q_len, kv_len)


def within_window(mask: Tensor, window: int) -> Tensor:
    """A mask [..., q_len, kv_len] that also hides what is `window` tokens or more behind its query."""
    q_len, kv_len = mask.shape[-2:]
    query_index = torch.arange(q_len, device=mask.device)[:, None] + (kv_len - q_len)
    return mask & (torch.arange(kv_len, device=mask.device)[None] > query_index - window)


def positions_from_mask(key_mask: Tensor, q_len: int) -> Tensor:
    """Position of the newest `q_len` tokens, int64 [batch, q_len]: how many real tokens come before."""
    return (key_mask.to(torch.int64).cumsum(-1) - 1).clamp(min=0)[:, -q_len:]


_rms_norm = partial(nn.RMSNorm, eps=1e-6)


class Block(nn.Module):
    """One layer: attention and a gated MLP, each after a norm."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim, value_dim = config.hidden_size, config.head_dim, config.value_dim or config.head_dim
        make_norm = _rms_norm if config.norm == "rms" else nn.LayerNorm
        self.attention_norm, self.mlp_norm = make_norm(hidden), make_norm(hidden)
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * config.rotary_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * (config.latent_dim or value_dim), bias=False)
        if config.latent_dim is not None:
            self.up_nope = dim - config.rotary_dim
            self.kv_up_proj = nn.Linear(
                config.latent_dim, config.num_heads * (self.up_nope + value_dim), bias=False
            )
        self.o_proj = nn.Linear(config.num_heads * value_dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def qkv(self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        batch, q_len, _ = hidden.shape
        normed, config = self.attention_norm(hidden), self.config
        q = self.q_proj(normed).view(batch, q_len, config.num_heads, -1).transpose(1, 2)
        k = self.k_proj(normed).view(batch, q_len, config.num_kv_heads, -1).transpose(1, 2)
        v = self.v_proj(normed).view(batch, q_len, config.num_kv_heads, -1).transpose(1, 2)
        if rotary is not None and config.latent_dim is not None:
            plain, rotated = q.split([self.up_nope, config.rotary_dim], dim=-1)
            q, k = torch.cat((plain, rotate(rotated, *rotary)), dim=-1), rotate(k, *rotary)
        elif rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        return q, k, v

    def expand(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that attention reads, of what is cached."""
        if self.config.latent_dim is None:
            return k, v
        batch, _, tokens, _ = v.shape
        up = self.kv_up_proj(v).view(batch, tokens, self.config.num_heads, -1).transpose(1, 2)
        nope, values = up.split([self.up_nope, up.shape[-1] - self.up_nope], dim=-1)
        return torch.cat((nope, k.expand(-1, self.config.num_heads, -1, -1)), dim=-1), values

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.o_proj(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class TinyDecoder(nn.Module):
    """Embedding, blocks, norm, head; weights drawn from `config.seed`, wide enough for peaked attention."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = config.head_dim**-0.5 if config.scale is None else config.scale
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embed = (
            nn.Embedding(config.max_positions, config.hidden_size) if config.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = (_rms_norm if config.norm == "rms" else nn.LayerNorm)(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(config.seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                gain = 2.0 if ("q_proj" in name or "k_proj" in name) else 1.0
                std = 1.0 if "embed" in name else gain * weight.shape[1] ** -0.5
                weight.data = torch.randn(weight.shape, generator=generator) * std
        # Of a size that matters beside scores of size 1.
        self.sinks = (
            nn.Parameter(1 + torch.randn(config.num_heads, generator=generator)) if config.sinks else None
        )
        self.slopes = 2.0 ** -torch.arange(1.0, config.num_heads + 1) if config.alibi else None
        self.requires_grad_(False)
        self.eval()

    def embed_inputs(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Any]:
        hidden = self.embed(input_ids)
        if self.position_embed is not None:
            return hidden + self.position_embed(position_ids), None
        return hidden, rotary_tables(position_ids, self.config.rotary_dim, hidden.dtype)

    def run(self, input_ids: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        """Logits [batch, q_len, vocab_size] with `attention` in place of the model's own."""
        hidden, rotary = self.embed_inputs(input_ids, position_ids)
        for layer_idx, block in enumerate(self.blocks):
            q, k, v = block.qkv(hidden, rotary)  # type: ignore[operator]
            hidden = block.finish(hidden, attention(layer_idx, q, k, v, self.scale))  # type: ignore[operator]
        return self.head(self.norm(hidden))

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The model's own attention on whole 16-bit k and v."""
        if self.slopes is not None:
            mask = self.biased(mask, q, k)
        if self.config.softcap is not None or self.sinks is not None:
            return self.spelt_out(q, k, v, mask)
        if self.config.repeat_kv == "expand":
            groups = self.config.num_heads // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)

    def _past_len(self, past: KVPairs | Cache, attention_mask: Tensor | None, q_len: int) -> int:
        for layer_idx in range(self.config.num_layers):
            if self.config.window_of(layer_idx) is None:
                return (
                    past.get_seq_length(layer_idx)
                    if isinstance(past, Cache)
                    else past[layer_idx][0].shape[-2]
                )
        assert attention_mask is not None
        return attention_mask.shape[-1] - q_len

    def biased(self, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """An additive mask with ALiBi: each head's slope times the distance from query to key."""
        assert self.slopes is not None
        keys = torch.arange(k.shape[2], device=q.device)
        distance = keys[None, :] - (
            torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
        )
        bias = self.slopes.to(q.dtype)[:, None, None] * distance
        mask = mask | (
            distance == 0
        )  # a query that is padding sees itself; else all that it sees is the length
        return torch.where(mask, bias, torch.finfo(q.dtype).min)

    def spelt_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Softcap and sinks, which `scaled_dot_product_attention` has not."""
        groups = self.config.num_heads // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.config.softcap is not None:
            scores = self.config.softcap * torch.tanh(scores / self.config.softcap)
        hidden = torch.finfo(q.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
        if self.sinks is None:
            return scores.softmax(-1) @ v
        sinks = self.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ v

    def forward(
        self,
        input_ids: Tensor,
        past: KVPairs | Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, KVPairs]:
        """Logits [batch, q_len, vocab_size] and each layer's present KV; `attention_mask` covers all keys.

        A cache of transformers gets the new pairs.
        """
        batch, q_len = input_ids.shape
        past_len = 0 if past is None else self._past_len(past, attention_mask, q_len)
        if position_ids is None:
            if attention_mask is None:
                position_ids = (torch.arange(q_len, device=input_ids.device) + past_len)[None].expand(
                    batch, q_len
                )
            else:
                position_ids = positions_from_mask(attention_mask, q_len)
        mask = attention_mask_4d(attention_mask, batch, q_len, past_len + q_len, input_ids.device)
        hidden, rotary = self.embed_inputs(input_ids, position_ids)
        presents: KVPairs = []
        for layer_idx, block in enumerate(self.blocks):
            q, k, v = block.qkv(hidden, rotary)  # type: ignore[operator]
            if isinstance(past, Cache):
                k, v = past.update(k, v, layer_idx)
            elif past is not None:
                k = torch.cat((past[layer_idx][0], k), dim=-2)
                v = torch.cat((past[layer_idx][1], v), dim=-2)
            window = self.config.window_of(layer_idx)
            if window is None:
                presents.append((k, v))
                keys, values = block.expand(k, v)  # type: ignore[operator]
                seen = mask
                if self.config.only_windows_padded:
                    seen = attention_mask_4d(None, batch, q_len, past_len + q_len, input_ids.device)
                if self.config.local_reach is not None and layer_idx in self.config.local_layers:
                    seen = within_window(mask, self.config.local_reach)
                hidden = block.finish(hidden, self.sdpa(q, keys, values, seen))  # type: ignore[operator]
            else:
                presents.append((k[:, :, 1 - window :], v[:, :, 1 - window :]))
                near = within_window(mask, window)[..., -k.shape[-2] :]
                keys, values = block.expand(k, v)  # type: ignore[operator]
                hidden = block.finish(hidden, self.sdpa(q, keys, values, near))  # type: ignore[operator]
        return self.head(self.norm(hidden)), presents


class Generated(NamedTuple):
    """Greedy output: tokens int64 [batch, num_tokens]; logits of each, [batch, num_tokens, vocab_size]."""

    tokens: Tensor
    logits: Tensor
    past: KVPairs
    attention_mask: Tensor


@torch.no_grad()
def generate(
    forward: Callable[..., tuple[Tensor, KVPairs]],
    input_ids: Tensor,
    num_tokens: int,
    attention_mask: Tensor | None = None,
    forced: Tensor | None = None,
) -> Generated:
    """Greedy decoding through any `TinyDecoder.forward`, compiled or not.

    `forced`, int64 [batch, num_tokens - 1], is fed instead of what was generated.
    """
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    logits, past = forward(input_ids, attention_mask=mask)
    all_logits = [logits[:, -1]]
    for step in range(num_tokens - 1):
        token = all_logits[-1].argmax(-1) if forced is None else forced[:, step]
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=-1)
        logits, past = forward(token[:, None], past=past, attention_mask=mask)
        all_logits.append(logits[:, -1])
    stacked = torch.stack(all_logits, dim=1)
    return Generated(stacked.argmax(-1), stacked, past, mask)
