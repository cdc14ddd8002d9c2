"""Inputs of decode attention of every kind, and what comes out of them in float64: the judge of all kernels.

Nothing here asks the package for an answer: codes are unpacked bit by bit and the formula of `DecodeInputs` is written
down once more. The quantiser only makes the planes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial

import torch
from hypothesis import strategies as st
from support import strategies
from support.oracle_methods import hadamard, largest_power_of_two, rudin_shapiro
from torch import Tensor

from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.kernels.base import DecodeInputs, Originals
from specache_fx.runtime.quant import QUANTIZERS

# What scores and values are like. "random" comes first: hypothesis shrinks towards it.
CONTENTS = ("random", "constant", "one_huge_score", "peaked", "outlier", "many_small", "zeros")


@dataclass(frozen=True)
class KernelCase:
    """Everything that a `DecodeInputs` is drawn from; see there for the names."""

    bits: int = 2
    group_size: int = 16
    quantizer: str = "kivi"
    groups: int = 4
    lanes: int = 2
    batch: int = 1
    num_kv_heads: int = 2
    num_kv_groups: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window_len: int = 5
    top_k: int = 3
    empty_slots: int = 0
    dtype: torch.dtype = torch.float32
    content: str = "random"
    masked: str = "none"
    bias: str = "none"
    softcap: float | None = None
    sinks: bool = False
    independent: bool = False
    aggregation: str = "mean"
    scored_lanes: int | None = None
    reads: tuple[int, int] | None = None  # keys and values of the host, as far as shares tell them apart
    seed: int = 0


@st.composite
def kernel_cases(draw: st.DrawFn) -> KernelCase:
    """Shapes small enough for CI, of every kind."""
    bits, lanes = draw(strategies.low_bits), draw(st.integers(1, 2))
    return KernelCase(
        bits=bits,
        group_size=draw(st.sampled_from((8, 16, 24, 40, 64, 128))),
        quantizer=draw(st.sampled_from(("kivi", "turboquant"))),
        groups=draw(st.integers(0, 5)),
        lanes=lanes,
        batch=draw(st.integers(1, 2)),
        num_kv_heads=draw(st.integers(1, 3)),
        num_kv_groups=draw(st.sampled_from((1, 2, 3, 4, 8))),
        key_dim=draw(st.sampled_from((8, 20, 64, 80, 128, 192))),
        value_dim=draw(st.sampled_from((8, 20, 64, 80, 128))),
        window_len=draw(st.integers(0, 20)),
        top_k=draw(st.sampled_from((0, 1, 7, 30))),
        empty_slots=draw(st.integers(0, 2)),
        dtype=draw(strategies.dtypes),
        content=draw(st.sampled_from(CONTENTS)),
        masked=draw(st.sampled_from(("none", "left", "holes", "visible", "all"))),
        bias=draw(st.sampled_from(("none", "shared", "by_head", "hiding"))),
        softcap=draw(st.sampled_from((None, *strategies.softcaps))),
        sinks=draw(st.booleans()),
        independent=draw(st.booleans()),
        aggregation=draw(st.sampled_from(("mean", "max"))),
        scored_lanes=draw(st.sampled_from((None, *range(lanes + 1)))),
        reads=draw(st.sampled_from((None, (0, 0), (1, 1), (9, 4), (60, 9), (1000, 1000)))),
        seed=draw(strategies.seeds),
    )


def make_inputs(case: KernelCase) -> DecodeInputs:
    """The inputs of a case; planes, window and staged rows are views with strides of their own, as a session's are."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def view(x: Tensor) -> Tensor:
        """With room for more rows behind them."""
        room = x.new_zeros(*x.shape[:2], x.shape[2] + 3, x.shape[3])
        room[:, :, : x.shape[2]] = x
        return room[:, :, : x.shape[2]]

    def room(x: Tensor) -> Tensor:
        """A buffer that begins with these rows; nobody may read the others."""
        return torch.cat([x, x.new_full((*x.shape[:2], 2, x.shape[3]), torch.nan)], 2)

    outer = (case.batch, case.num_kv_heads)
    quantized = case.groups * case.group_size
    stored, num_heads = quantized + case.window_len, case.num_kv_heads * case.num_kv_groups
    query = random(case.lanes, case.batch, num_heads, 1, case.key_dim)
    key, value = random(*outer, quantized, case.key_dim), random(*outer, quantized, case.value_dim)
    if case.content == "constant":
        key, value = key[:, :, :1].expand_as(key), value[..., :1].expand_as(value)
    elif case.content == "one_huge_score" and quantized:
        key[:, :, quantized // 2] = 10 * query[0, :, :: case.num_kv_groups, 0]
    elif case.content == "peaked":
        query = query * 6
    elif case.content == "outlier":
        key[..., 0] *= 20
    elif case.content == "many_small":
        # One large probability a block beside many that are next to nothing, and whose values are alike.
        key, value = key * 0.1, value * 0.1 + 1
        key[:, :, ::64] = 1.5 * query[0, :, :: case.num_kv_groups]
        value[:, :, ::64] = -1
    elif case.content == "zeros":
        key, value = torch.zeros_like(key), torch.zeros_like(value)
    key, value = key.to(case.dtype), value.to(case.dtype)

    quantizer = QUANTIZERS[case.quantizer](case.bits, case.group_size)
    top_k = min(case.top_k, quantized)
    indices = torch.full((*outer, top_k), -1, dtype=torch.int32)
    for row in indices.flatten(0, 1):
        chosen = torch.randperm(quantized, generator=generator)[: max(top_k - case.empty_slots, 0)]
        row[: len(chosen)] = chosen
    inputs = DecodeInputs(
        query=query.to(case.dtype),
        key=random(case.lanes, *outer, 1, case.key_dim).to(case.dtype),
        value=random(case.lanes, *outer, 1, case.value_dim).to(case.dtype),
        quantizer=quantizer,
        key_planes=tuple(map(view, quantizer.quantize_key(key))) if quantized else (),
        value_planes=tuple(map(view, quantizer.quantize_value(value))) if quantized else (),
        num_quantized=quantized,
        window_rows=(
            room(random(*outer, case.window_len, case.key_dim).to(case.dtype)),
            room(random(*outer, case.window_len, case.value_dim).to(case.dtype)),
        ),
        window_len=case.window_len,
        staged_rows=random(*outer, top_k, case.key_dim + case.value_dim).to(case.dtype) if top_k else None,
        staged_indices=indices if top_k else None,
        key_mask=None,
        scale=case.key_dim**-0.5,
        independent_lanes=case.independent,
        softcap=case.softcap,
        sinks=random(num_heads).to(case.dtype) if case.sinks else None,
        aggregation=case.aggregation,
        scored_lanes=case.scored_lanes,
    )
    inputs = replace(inputs, **_masks(case, stored, num_heads, generator))
    return (
        inputs if case.reads is None or not quantized else _with_originals(inputs, (key, value), *case.reads)
    )


def _with_originals(
    inputs: DecodeInputs, pairs: tuple[Tensor, Tensor], keys: int, values: int
) -> DecodeInputs:
    """The host's pairs in two blocks, and shares that so many keys and values exceed; as any rounding sees them."""
    key, value = pairs
    batch, heads, tokens, key_dim = key.shape
    host = HostCache(batch, [(heads, key_dim, value.shape[3])], key.dtype)
    first = tokens // 3
    host.append(0, key[:, :, :first], value[:, :, :first])
    host.append(0, key[:, :, first:], value[:, :, first:])

    def given(key_share: float, value_share: float) -> DecodeInputs:
        counts = torch.zeros(2, dtype=torch.int64)
        read = partial(host.read, 0)
        originals = Originals(host.table(0), host.length(0), read, key_share, value_share, counts)
        return replace(inputs, originals=originals)

    narrow = key.dtype == torch.bfloat16 and inputs.quantizer.bits <= 2
    apart = 1.25 if narrow else 1.02
    key_share = _between(truth_of(given(1.0, 1.0)).key_shares, keys, apart)
    return given(key_share, _between(truth_of(given(key_share, 1.0)).value_shares, values, apart))


def _between(shares: Tensor, count: int, apart: float) -> float:
    """A number that `count` shares exceed, or more: none is near it."""
    found = shares.flatten().sort(descending=True).values.tolist()
    found = [1.0, *(share for share in found if share > 0)]
    for larger, smaller in list(itertools.pairwise(found))[count:]:
        if larger > apart**2 * smaller:
            return (larger * smaller) ** 0.5
    return 0.0


def _masks(case: KernelCase, stored: int, num_heads: int, generator: torch.Generator) -> dict[str, Tensor]:
    masks: dict[str, Tensor] = {}
    columns = stored + case.lanes
    if case.masked in ("left", "holes", "all"):
        real = torch.rand(case.batch, stored, generator=generator) < 0.5
        if case.masked == "left":
            real = torch.arange(stored).expand(case.batch, -1) >= stored // 3
        masks["key_mask"] = real & (case.masked != "all")
    elif case.masked == "visible":
        masks["visible"] = torch.rand(case.lanes, case.batch, columns, generator=generator) < 0.5
    if case.bias != "none":
        heads, batch = (1, 1) if case.bias == "shared" else (num_heads, case.batch)
        bias = torch.randn(case.lanes, batch, heads, columns, generator=generator)
        if case.bias == "hiding":
            bias[torch.rand(bias.shape, generator=generator) < 0.3] = -torch.inf
        masks["bias"] = bias
    return masks


@dataclass(frozen=True)
class Truth:
    """What attention gives in float64.

    Attributes:
        out: `[lanes, batch, num_heads, 1, value_dim]`.
        scores: As `Kernel.attention` gives them.
        largest_value: Of all values that are attended to, their magnitude.
        largest_logit: Of all finite products of queries and keys, scaled, before softcap.
        key_shares: Lane 0's of pairs that are in codes alone, `[batch, num_kv_heads, num_quantized]`, by their codes:
            what they may be.
        value_shares: Likewise with the exact keys in place, of these pairs; 0 elsewhere.
        num_read: Keys and values of the host.
    """

    out: Tensor
    scores: Tensor
    largest_value: float
    largest_logit: float
    key_shares: Tensor
    value_shares: Tensor
    num_read: list[int]


def truth_of(inputs: DecodeInputs) -> Truth:
    """The formula, pair by pair, nothing rounded."""
    lanes, num_kv_heads, value_dim = inputs.query.shape[0], inputs.key.shape[2], inputs.value.shape[4]
    count, key_dim = inputs.num_quantized, inputs.query.shape[4]
    keys, values = inputs.window_key.double(), inputs.window_value.double()
    free = torch.ones(*keys.shape[:2], count, dtype=torch.bool)  # in codes alone
    if count:
        low_key, low_value = _codes(inputs, key_dim, value_dim)
        if inputs.staged_rows is not None and inputs.staged_indices is not None:
            for b, h, slot in (inputs.staged_indices >= 0).nonzero().tolist():
                token, row = int(inputs.staged_indices[b, h, slot]), inputs.staged_rows[b, h, slot].double()
                low_key[b, h, token], low_value[b, h, token] = row[:key_dim], row[key_dim:]
                free[b, h, token] = False
        keys, values = torch.cat([low_key, keys], 2), torch.cat([low_value, values], 2)
    stored = keys.shape[2]
    own_keys = inputs.key.double().squeeze(3).permute(1, 2, 0, 3)
    own_values = inputs.value.double().squeeze(3).permute(1, 2, 0, 3)
    keys, values = torch.cat([keys, own_keys], 2), torch.cat([values, own_values], 2)

    def shares(probs: Tensor, of: Tensor) -> Tensor:
        heads = probs[0, ..., :count].unflatten(1, (num_kv_heads, -1))
        return torch.where(of, heads.amax(2) if inputs.aggregation == "max" else heads.mean(2), 0.0)

    probs, largest_logit = _softmax(inputs, keys)
    margins = _margins(inputs) if inputs.originals is not None else 1.0
    key_shares = shares(probs[..., :count] * margins, free)
    value_shares = torch.zeros_like(key_shares)
    num_read = [0, 0]
    if inputs.originals is not None:
        exact_key, exact_value = (side.double() for side in inputs.originals.read(0, count))
        by_key = key_shares > inputs.originals.key_share
        keys[:, :, :count][by_key] = exact_key[by_key]
        probs, again = _softmax(inputs, keys)
        largest_logit = max(largest_logit, again)
        value_shares = shares(probs, by_key)
        by_value = value_shares > inputs.originals.value_share
        values[:, :, :count][by_value] = exact_value[by_value]
        num_read = [int(by_key.sum()), int(by_value.sum())]

    repeat = inputs.query.shape[2] // num_kv_heads
    out = torch.einsum("lbhn,bhnd->lbhd", probs, values.repeat_interleave(repeat, 1))
    scored = probs if inputs.scored_lanes is None else probs[lanes - inputs.scored_lanes :]
    scored = scored[..., : stored + 1].unflatten(2, (num_kv_heads, repeat))
    scores = scored.amax(3) if inputs.aggregation == "max" else scored.mean(3)
    if inputs.key_mask is not None:
        scores[..., :-1].masked_fill_(~inputs.key_mask[None, :, None], -1.0)
    if inputs.visible is not None:
        scores[..., :-1].masked_fill_(~inputs.visible[lanes - len(scores) :, :, None, :stored], -1.0)
    largest = float(values.abs().max())
    return Truth(out[:, :, :, None], scores, largest, largest_logit, key_shares, value_shares, num_read)


def _margins(inputs: DecodeInputs) -> Tensor:
    """E to 0.3 steps of each channel's code, times the query: `[lanes, batch, num_heads, num_quantized]`."""
    query = inputs.query.double().squeeze(3) * inputs.scale
    repeat = query.shape[2] // inputs.key.shape[2]
    scale = inputs.key_planes[1].double().repeat_interleave(repeat, 1)
    if inputs.quantizer.name == "turboquant":
        balance = inputs.key_planes[3].double().repeat_interleave(repeat, 1)[:, :, 0]
        block = largest_power_of_two(query.shape[-1])
        deviation = (query * balance).norm(dim=-1, keepdim=True) * block**0.5 * scale[None, ..., 0]
    else:
        by_group = (query[:, :, :, None] * scale).square().sum(-1).sqrt()
        deviation = by_group.repeat_interleave(inputs.quantizer.group_size, -1)
    return (0.3 * deviation).clamp(max=20).exp()


def _softmax(inputs: DecodeInputs, keys: Tensor) -> tuple[Tensor, float]:
    """Probabilities `[lanes, batch, num_heads, stored + lanes]`, and the largest product."""
    lanes, batch, num_heads, _, _ = inputs.query.shape
    stored = keys.shape[2] - lanes
    repeat = num_heads // inputs.key.shape[2]
    logits = inputs.query.double().squeeze(3)[..., None, :] * keys.repeat_interleave(repeat, 1)[None]
    logits = logits.sum(-1) * inputs.scale
    largest_logit = float(logits.abs().max())
    if inputs.softcap is not None:
        logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
    if inputs.bias is not None:
        logits = logits + inputs.bias.double()
    seen = torch.ones(lanes, batch, stored + lanes, dtype=torch.bool)
    for lane in range(lanes):
        for other in range(lanes):
            seen[lane, :, stored + other] = other == lane or (other < lane and not inputs.independent_lanes)
    if inputs.visible is not None:
        seen = inputs.visible.clone()
    if inputs.key_mask is not None:
        seen[..., :stored] &= inputs.key_mask
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    if inputs.sinks is not None:
        sinks = inputs.sinks.double().expand(lanes, batch, -1)[..., None]
        logits = torch.cat([logits, sinks], -1)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True).clamp(min=-1e300))
    mass = weights.sum(-1, keepdim=True)
    return (weights / torch.where(mass == 0, 1.0, mass))[..., : stored + lanes], largest_logit


def _codes(inputs: DecodeInputs, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    bits, group_size = inputs.quantizer.bits, inputs.quantizer.group_size

    def bit_by_bit(packed: Tensor, channels: int) -> Tensor:
        stream = torch.stack([(packed >> bit) & 1 for bit in range(8)], -1).flatten(-2)
        stream = stream[..., : channels * bits].unflatten(-1, (channels, bits)).double()
        return (stream * torch.tensor([2.0**bit for bit in range(bits)])).sum(-1)

    if inputs.quantizer.name == "turboquant":
        key, value = (
            _rotated_back(
                (bit_by_bit(codes, dim) - (2**bits - 1) / 2) * scale.double()
                + mean.double().repeat_interleave(group_size, 2)
            )
            for (codes, scale, mean), dim in (
                (inputs.key_planes[:3], key_dim),
                (inputs.value_planes, value_dim),
            )
        )
        return key * inputs.key_planes[3].double(), value
    codes, scale, zero = inputs.key_planes
    by_token = (x.double().repeat_interleave(group_size, 2) for x in (scale, zero))
    key_scale, key_zero = by_token
    key = bit_by_bit(codes, key_dim) * key_scale + key_zero
    codes, scale, zero = inputs.value_planes
    channels = min(group_size, value_dim)
    value_scale, value_zero = (
        x.double().repeat_interleave(channels, 3)[..., :value_dim] for x in (scale, zero)
    )
    return key, bit_by_bit(codes, value_dim) * value_scale + value_zero


def _rotated_back(x: Tensor) -> Tensor:
    """Times Hadamard's matrix with its signs, in blocks of channels; float64."""
    block = largest_power_of_two(x.shape[-1])
    signs = block * rudin_shapiro(block).double()
    return torch.cat([hadamard(part) * signs for part in x.split(block, dim=-1)], dim=-1)
