"""Keys and values for the tests of quantisers: shapes and layouts are drawn, numbers come from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from support.strategies import QUANT_FILLS, filled
from torch import Tensor

from specache_fx.runtime.quant import QUANTIZERS, KVKind, Planes, Quantizer

METHODS = [(name, bits) for name, method in QUANTIZERS.items() for bits in method.valid_bits]
KINDS: tuple[KVKind, ...] = ("key", "value")
HEAD_DIMS = [1, 3, 8, 16, 20, 64, 80, 96, 128]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def quantizer_of(name: str, bits: int, group_size: int = 64) -> Quantizer:
    return QUANTIZERS[name](bits, group_size)


@st.composite
def inputs(
    draw: st.DrawFn,
    dtypes: list[torch.dtype] = DTYPES,
    fills: Sequence[str] = QUANT_FILLS,
    head_dims: list[int] = HEAD_DIMS,
    group_sizes: tuple[int, ...] = (1, 2, 5, 8, 64),
) -> tuple[int, Tensor]:
    """A group size and keys or values, 0 to 3 groups of them."""
    group_size = draw(st.sampled_from(group_sizes))
    tokens = draw(st.integers(0, 3)) * group_size
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), tokens, draw(st.sampled_from(head_dims)))
    x = filled(shape, draw(st.sampled_from(dtypes)), draw(st.sampled_from(fills)), draw(st.integers(0, 99)))
    if draw(st.booleans()):
        # The layout of a projection's output: strides of [batch, tokens, heads, head_dim].
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return group_size, x


def quantize(quantizer: Quantizer, kind: KVKind, x: Tensor, real: Tensor | None = None) -> Planes:
    return quantizer.quantize_key(x, real) if kind == "key" else quantizer.quantize_value(x, real)


def roundtrip(
    quantizer: Quantizer, kind: KVKind, x: Tensor, real: Tensor | None = None
) -> tuple[Planes, Tensor]:
    """The planes, and what comes back of them."""
    planes = quantize(quantizer, kind, x, real)
    back: Any = quantizer.dequantize_key if kind == "key" else quantizer.dequantize_value
    return planes, back(planes, x.shape[3], x.dtype)


def keys_with_offsets(tokens: int = 512, head_dim: int = 128) -> Tensor:
    """Normal keys with an offset in eight of the slowly rotating channels, as LLMs' have them, after RoPE.

    float32 [1, 2, tokens, head_dim].
    """
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, tokens, head_dim, generator=gen)
    offsets = torch.tensor([4.0, 6.0, 10.0, -12.0, 8.0, -5.0, 9.0, 11.0])
    x[..., head_dim // 4 : head_dim // 2 : head_dim // 32] += offsets
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = (torch.arange(tokens)[:, None] * frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=3)
    return x * angles.cos() + torch.cat([-second, first], dim=3) * angles.sin()


def loss(x: Tensor, back: Tensor) -> float:
    """Mean squared error as a part of the variance."""
    return float(((x - back) ** 2).mean() / x.var())
