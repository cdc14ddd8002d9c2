"""Every hypothesis strategy of the tests.

Structure is drawn (shapes, layouts, options, seeds); values come from a seeded generator, so that examples
stay small to print and to replay, with the adversarial fills that random values never hit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from support.models import TinyConfig, TinyDecoder
from torch import Tensor

from specache_fx.config import BITS, POLICIES, SpecacheConfig
from specache_fx.runtime.quant import QUANTIZERS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOW_BITS = (1, 2, 4, 8)
HEAD_DIMS = (8, 16, 20, 32)
# "random" comes first: hypothesis shrinks towards it.
FILLS = ("random", "constant", "constant_huge", "ties", "zeros", "extremes", "outlier")
QUANT_FILLS = (*FILLS[:5], "outlier", "huge", "tiny", "two_values", "offset")

seeds = st.integers(0, 2**16)
dtypes = st.sampled_from(DTYPES)
low_bits = st.sampled_from(LOW_BITS)
bits = st.sampled_from(BITS)
# Every method with each of its widths: the options "quantizer" and "bits".
quantizers = st.sampled_from([(name, b) for name, method in QUANTIZERS.items() for b in method.valid_bits])
policies = st.sampled_from(tuple(POLICIES))
group_sizes = st.sampled_from((4, 8, 16))
residual_lengths = st.integers(0, 24)
top_ks = st.integers(1, 20)
resident_layers = st.sampled_from((0, 0, 0, 1, 2))
sink_tokens = st.sampled_from((0, 0, 1, 3, 9))
lookaheads = st.sampled_from(("token", "query", "none"))
# None; nothing; some; all that is seen.
shares = st.sampled_from((None, None, 0.9, 0.05, 0.011, 0.0))
aggregations = st.sampled_from(("mean", "max"))
misses = st.sampled_from(("keep", "recover", "refetch"))
softcaps = (1e-42, 1e-3, 3.0, 30.0, 1e4, 1e6, 1e8, 1e30, 3e38)  # no strategy: all of them
tracking = st.sampled_from((True, "steps", False))


@st.composite
def configs(draw: st.DrawFn, /, **fixed: object) -> SpecacheConfig:
    """Options that act within a few dozen tokens; `fixed` ones are taken as given, others as the policy has them."""
    drawn: dict[str, object] = {
        "bits": draw(bits),
        "group_size": draw(group_sizes),
        "residual_length": draw(residual_lengths),
        "top_k": draw(top_ks),
        "quantizer": draw(st.sampled_from(("kivi", "turboquant"))),
        "lookahead": draw(lookaheads),
        "aggregation": draw(aggregations),
        "on_miss": draw(misses),
        "key_share": draw(shares),
        "value_share": draw(shares),
        "resident_layers": draw(resident_layers),
        "sink_tokens": draw(sink_tokens),
    }
    chosen = {**drawn, **fixed}
    if chosen["lookahead"] != "token" or fixed.get("policy", "specache") != "specache":
        drawn["on_miss"] = "keep"
    if fixed.get("policy") == "kcache":
        for name in ("bits", "lookahead", "sink_tokens"):
            del drawn[name]
    if fixed.get("policy", "specache") != "specache":
        drawn["key_share"] = drawn["value_share"] = None
    elif chosen["key_share"] is None:
        drawn["value_share"] = None
    return SpecacheConfig(**{**drawn, **fixed})  # type: ignore[arg-type]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention; `num_heads` is a multiple of `num_kv_heads`."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@st.composite
def attention_shapes(draw: st.DrawFn) -> AttentionShape:
    """Batch 1 to 3; MHA, GQA and MQA; keys and values as wide as each other or not."""
    num_kv_heads, num_kv_groups = draw(st.sampled_from(((1, 1), (2, 1), (4, 1), (2, 2), (1, 4), (2, 3))))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    value_dim = draw(st.one_of(st.just(head_dim), st.sampled_from(HEAD_DIMS)))
    return AttentionShape(
        draw(st.integers(1, 3)), num_kv_heads * num_kv_groups, num_kv_heads, head_dim, value_dim
    )


@st.composite
def left_paddings(draw: st.DrawFn, batch: int, kv_len: int) -> Tensor:
    """Key mask, bool [batch, kv_len], True where real: rows start with 0 to `kv_len - 1` padded tokens."""
    padding = [draw(st.integers(0, kv_len - 1)) for _ in range(batch)]
    return torch.arange(kv_len)[None, :] >= torch.tensor(padding)[:, None]


@st.composite
def key_masks(draw: st.DrawFn, batch: int, kv_len: int) -> Tensor:
    """Key mask, bool [batch, kv_len]: all real, padded left, right or in the middle, or with holes.

    The newest token of a mask with holes is real.
    """
    kind = draw(st.sampled_from(("real", "left", "right", "middle", "holes")))
    if kind == "real":
        return torch.ones(batch, kv_len, dtype=torch.bool)
    if kind == "left":
        return draw(left_paddings(batch, kv_len))
    if kind == "right":
        return draw(left_paddings(batch, kv_len)).flip(1)
    if kind == "middle":
        place, (first, second) = torch.arange(kv_len), (draw(st.integers(0, kv_len)) for _ in range(2))
        return ((place < min(first, second)) | (place >= max(first, second))).expand(batch, -1)
    generator = torch.Generator().manual_seed(draw(seeds))
    mask = torch.rand(batch, kv_len, generator=generator) < draw(st.sampled_from((0.1, 0.5, 0.9)))
    mask[:, -1] = True
    return mask


def filled(shape: tuple[int, ...], dtype: torch.dtype, fill: str, seed: int) -> Tensor:
    """Finite numbers [..., tokens, channels]; of `QUANT_FILLS` too.

    "extremes" stays at a quarter of the dtype's range, "huge" in the half of it where error bounds hold: the top code
    of a group that spans all of it can overflow the dtype when dequantised. A constant group must survive at its end.
    float64 has float32's range.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    match fill:
        case "constant":  # along tokens and channels, so that K's groups and V's are both constant
            x = x[..., :1, :1].expand(shape) * 3
        case "constant_huge":
            x = torch.full(shape, info.max if seed % 2 else info.min)
        case "zeros":
            x = torch.zeros(shape)
        case "extremes":
            choices = torch.tensor([info.max / 4, -info.max / 4, info.tiny, -info.tiny, 0.0, 1.0])
            x = choices[torch.randint(len(choices), shape, generator=generator)]
        case "huge":
            biggest = info.max if dtype == torch.float16 else 1.6e38
            x = x.sign() * biggest * torch.randint(0, 3, shape, generator=generator).clamp(max=1)
        case "tiny":
            x = x * info.tiny
        case "two_values":
            x = torch.where(x > 0, 1.0, 2.0)
        case "offset":
            x = x + 1000
        case "outlier":  # one channel far from the others, as keys have them
            x[..., :1] *= 100
        case "ties":
            x = (x * 4).round() / 4
    return x.to(dtype).contiguous()


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """`filled` with a fill and a seed of its choice."""
    return filled(shape, dtype or draw(dtypes), draw(st.sampled_from(FILLS)), draw(seeds))


@st.composite
def tiny_configs(draw: st.DrawFn, latent: bool = False) -> TinyConfig:
    """Small decoders of every build that `TinyConfig` knows; `latent`: with latent attention for sure."""
    shape = draw(attention_shapes())
    if latent:
        shape = replace(shape, head_dim=32)
    # Where latent, half of a head's channels are cached; handles need 16 of them in 16 bits.
    widths = (16, 20) if latent else (None, None, 16, 20)
    latent_dim = draw(st.sampled_from(widths)) if shape.head_dim == 32 else None
    return TinyConfig(
        num_layers=draw(st.integers(1, 2)),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads if latent_dim is None else 1,
        latent_dim=latent_dim,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        positions=draw(st.sampled_from(("rotary", "learned"))),
        norm=draw(st.sampled_from(("rms", "layer"))),
        repeat_kv=draw(st.sampled_from(("sdpa", "expand"))),
        softcap=draw(st.sampled_from((None, None, 2.0))),
        sinks=draw(st.sampled_from((False, False, True))),
        alibi=draw(st.sampled_from((False, False, True))),
        seed=draw(st.integers(0, 7)),
    )


@dataclass(frozen=True)
class Prompt:
    """A model, and a batch of left-padded prompts for it: int64 and bool [batch, prompt_len].

    With `untraced` the prompt runs without a graph, where the model and the policy allow it.
    """

    model: TinyDecoder
    input_ids: Tensor
    attention_mask: Tensor
    untraced: bool = False


@st.composite
def prompts(
    draw: st.DrawFn,
    dtype: torch.dtype = torch.float32,
    min_len: int = 1,
    max_len: int = 40,
    latent: bool = False,
) -> Prompt:
    """A tiny decoder in `dtype` with a prompt of `min_len` to `max_len` tokens, batch 1 to 3."""
    config = draw(tiny_configs(latent))
    batch, prompt_len = draw(st.integers(1, 3)), draw(st.integers(min_len, max_len))
    generator = torch.Generator().manual_seed(draw(seeds))
    input_ids = torch.randint(config.vocab_size, (batch, prompt_len), generator=generator)
    padding = draw(left_paddings(batch, prompt_len))
    return Prompt(TinyDecoder(config).to(dtype), input_ids, padding, draw(st.booleans()))
