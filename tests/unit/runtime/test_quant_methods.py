"""Formulas of `nuq`, `rotated`, `zipcache` and `turboquant` by hand, and the documents of all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lloyd_levels import lloyd_levels
from support.quant_inputs import (
    KINDS,
    METHODS,
    inputs,
    keys_with_offsets,
    loss,
    quantize,
    quantizer_of,
    roundtrip,
)
from support.strategies import filled, key_masks
from torch import Tensor

from specache_fx.runtime.quant import KVKind, Planes, on_cpu
from specache_fx.runtime.quant.compared.nuq import codebook
from specache_fx.runtime.quant.hadamard import block_size, signs, transform
from specache_fx.runtime.quant.packing import unpack

PAPER_MAP = Path(__file__).resolve().parents[3] / "docs" / "paper_map.md"


# nuq


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codebook_is_what_lloyds_procedure_gives(bits: int) -> None:
    assert codebook(bits) == lloyd_levels(bits)


def test_nuq_by_hand() -> None:
    """Zero is the middle of the span, the scale half of it; levels at +-0.2 and +-0.67 of that."""
    x = torch.tensor([0.0, 1.0, 2.5, 5.0, 9.0, 10.0]).reshape(1, 1, 6, 1)
    (packed, scale, zero), back = roundtrip(quantizer_of("nuq", 2, 6), "key", x)
    assert (scale.item(), zero.item()) == (5.0, 5.0)
    # In units: -1, -0.8, -0.5, 0, 0.8, 1. A number between two levels, as 0 is, gets the lower one.
    assert unpack(packed, 2, 1).flatten().tolist() == [0, 0, 0, 1, 3, 3]
    inner, outer = 5 * 821 / 4096, 5 * 2737 / 4096
    assert back.flatten().tolist() == pytest.approx(
        [5 - outer, 5 - outer, 5 - outer, 5 - inner, 5 + outer, 5 + outer]
    )


@pytest.mark.parametrize(("bits", "half_interval"), [(1, 0.6416), (2, 0.3318), (4, 0.0948)])
def test_nuqs_bound_is_half_the_widest_interval_and_is_reached(bits: int, half_interval: float) -> None:
    """Over all numbers of a span: the bound is no larger than it has to be."""
    x = torch.linspace(-1, 1, 4097).reshape(1, 1, -1, 1)
    quantizer = quantizer_of("nuq", bits, x.shape[2])
    planes, back = roundtrip(quantizer, "key", x)
    bound = quantizer.error_bound(planes, 1, "key")
    assert bound.unique().item() == pytest.approx(half_interval, abs=1e-4)
    assert (x - back).abs().max() == pytest.approx(half_interval, abs=1e-3)


# rotated


@pytest.mark.parametrize(
    ("head_dim", "block"), [(1, 1), (3, 1), (8, 8), (20, 4), (64, 64), (80, 16), (96, 32)]
)
def test_rotation_is_a_hadamard_matrix_in_blocks(head_dim: int, block: int) -> None:
    assert block_size(head_dim) == block
    matrix = transform(torch.eye(head_dim), block)
    for row in range(head_dim):
        for column in range(head_dim):
            same = row // block == column // block
            # Sylvester's: minus where the binary forms share an odd number of ones.
            sign = (-1) ** ((row % block) & (column % block)).bit_count()
            assert matrix[row, column] == (sign / block if same else 0)
    assert torch.equal(matrix @ matrix, torch.eye(head_dim) / block)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_signs_make_equal_numbers_as_flat_as_can_be(block: int) -> None:
    pattern = signs(block, torch.device("cpu"))
    assert set(pattern.tolist()) <= {1.0, -1.0}
    flat = transform(pattern, block).abs() * block**0.5
    assert flat.max() <= 2**0.5 + 1e-6  # the mean of squares is 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("fill", ["random", "constant", "outlier", "offset"])
def test_rotated_error_is_bound_in_the_norm(fill: str, bits: int, kind: KVKind) -> None:
    """The rotation keeps lengths: a token's error is at most as long as half its scales, in the orthonormal one."""
    x = filled((1, 2, 64, 80), torch.float32, fill, 2)
    planes, back = roundtrip(quantizer_of("rotated", bits, 32), kind, x)
    scales = planes[1].repeat_interleave(32 if kind == "key" else 1, dim=2)
    if kind == "value":
        scales = scales.repeat_interleave(32, dim=3)[..., :80]
    # Numbers are stored divided by the root of 16 once more.
    bound = 16**0.5 * (scales / 2).norm(dim=3)
    assert ((back - x).norm(dim=3) <= bound * (1 + 1e-5) + 1e-5 * x.abs().amax()).all()


@pytest.mark.parametrize(("name", "least"), [("rotated", 3), ("zipcache", 4)])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_keys_lose_least_by_channel(name: str, least: int, bits: int) -> None:
    """Why keys of both stay by channel, and what the rotation is worth where a group mixes channels (by token)."""
    x = keys_with_offsets()
    by_channel, by_token = (loss(x, roundtrip(quantizer_of(name, bits), kind, x)[1]) for kind in KINDS)
    assert least * by_channel < by_token
    if name == "rotated":
        assert by_token < loss(x, roundtrip(quantizer_of("kivi", bits), "value", x)[1]) / 3


# zipcache


def test_zipcache_values_by_hand() -> None:
    """Channels of sizes 4 and 16 become 1/4 and 1/16 of what they are times 2 and 4, then two codes a token."""
    x = torch.tensor([[4.0, -16.0], [2.0, 16.0]]).reshape(1, 1, 2, 2)
    (packed, scale, zero, size), back = roundtrip(quantizer_of("zipcache", 2, 2), "value", x)
    assert size.flatten().tolist() == [2.0, 4.0]
    # Divided: [2, -4] and [1, 4].
    assert (zero.flatten().tolist(), scale.flatten().tolist()) == ([-4.0, 1.0], [2.0, 1.0])
    assert unpack(packed, 2, 2).tolist() == [[[[3, 0], [0, 3]]]]
    assert torch.equal(back, x)


def test_zipcache_keys_are_kivis() -> None:
    x = filled((1, 2, 16, 20), torch.bfloat16, "outlier", 0)
    ours, theirs = (quantize(quantizer_of(name, 2, 8), "key", x) for name in ("zipcache", "kivi"))
    assert all(torch.equal(*planes) for planes in zip(ours, theirs, strict=True))


# turboquant


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_turboquant_keeps_the_norm_of_what_is_centred(bits: int) -> None:
    x = keys_with_offsets()
    _, back = roundtrip(quantizer_of("turboquant", bits), "value", x)
    # By group, the mean is kept too: lengths from there are those of before, but for rounding of what rotates back.
    groups, held = (y.unflatten(2, (-1, 64)) for y in (x, back))
    torch.testing.assert_close(
        (held - groups.mean(3, keepdim=True)).norm(dim=-1),
        (groups - groups.mean(3, keepdim=True)).norm(dim=-1),
        rtol=1e-4,
        atol=1e-3,
    )


def score_error(name: str, bits: int, keys: Tensor, queries: Tensor) -> float:
    """Variance of the error of products with queries."""
    _, back = roundtrip(quantizer_of(name, bits), "key", keys)
    return float((queries @ (back - keys).mT).var())


@pytest.mark.parametrize("bits", [1, 2])
def test_turboquant_gives_good_scores_wherever_queries_are_large(bits: int) -> None:
    """By products with queries; results/real_*.json has trained models'."""
    keys = keys_with_offsets()
    noise = torch.randn(keys.shape, generator=torch.Generator().manual_seed(1))
    alike = {name: score_error(name, bits, keys, keys + noise) for name in ("turboquant", "kivi", "rotated")}
    assert min(alike, key=alike.__getitem__) == "turboquant", alike
    # Queries are large where keys vary little, as behind norms with weights: a rotation alone spoils these.
    width = torch.logspace(-1.5, 0, keys.shape[3])
    unlike = [score_error(name, bits, noise * width, noise.roll(1, 2) / width) for name in alike]
    assert 4 * unlike[0] < unlike[2], unlike


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@settings(max_examples=20, deadline=None)
@given(drawn=inputs(), strided=st.booleans(), data=st.data())
def test_turboquant_in_cpp_gives_the_planes_of_pytorch(
    bits: int, drawn: tuple[int, Tensor], strided: bool, data: st.DataObject
) -> None:
    group_size, x = drawn
    if strided:
        x = x.repeat(1, 1, 1, 2)[..., ::2]
    quantizer = quantizer_of("turboquant", bits, group_size)
    assert on_cpu.packs(x, group_size) == (x.numel() > 0)
    real = data.draw(key_masks(x.shape[0], x.shape[2])) if x.numel() else None
    ours = *quantizer.quantize_key(x, real), *quantizer.quantize_value(x, real)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_cpu, "packs", lambda *_: False)
        theirs = *quantizer.quantize_key(x, real), *quantizer.quantize_value(x, real)
    for plane, other in zip(ours, theirs, strict=True):
        assert torch.equal(plane, other)


@pytest.mark.parametrize("pads", [8, 19, 32])
def test_turboquant_balances_a_padded_row_as_the_row_alone(pads: int) -> None:
    """Chunk by chunk, as a session quantises: groups of padding come first, and a window of 8 tokens is known."""
    quantizer = quantizer_of("turboquant", 2, 8)
    alone = filled((1, 2, 48 - pads, 16), torch.float32, "offset", 0)
    padded = torch.cat([torch.full((1, 2, pads, 16), 3.0), alone], dim=2)
    batch = torch.cat([padded, filled((1, 2, 48, 16), torch.float32, "random", 1)])
    real = torch.arange(48) >= torch.tensor([[pads], [0]])
    parts: list[Planes] = []
    held: Planes = ()
    for start in range(0, 40, 8):
        known = start + 16
        parts.append(quantizer.quantize_more_keys(batch[:, :, start:known], held, real[:, :known], 8))
        held = *(torch.cat(planes, 2) for planes in list(zip(*parts, strict=True))[:3]), parts[-1][3]
    assert torch.equal(held[3][:1], quantizer.quantize_key(alone[:, :, :8])[3])
    assert torch.equal(held[3][1:], quantizer.quantize_key(batch[1:, :, :8])[3])
    at_once = quantizer.quantize_more_keys(batch, (), real, 8)
    for plane, other in zip(at_once, held, strict=True):
        assert torch.equal(plane[1:], other[1:])
    assert torch.equal(at_once[3], held[3])
    assert torch.equal(at_once[0][:1, :, pads:], held[0][:1, :, pads:])


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_turboquant_balances_few_tokens_less(tokens: int) -> None:
    """Of normal numbers alike in all channels, two tokens would make one channel's spread many times another's."""
    quantizer = quantizer_of("turboquant", 2, 64)
    keys, real = filled((1, 1, 64, 16), torch.float32, "random", 0), torch.arange(64)[None] < tokens
    balance = quantizer.quantize_key(keys, real)[3]
    assert float(balance.max() / balance.min()) < (1.001 if tokens == 1 else 2.5)
    keys[..., 3] *= 30
    outlier = quantizer.quantize_key(keys, real)[3]
    assert tokens == 1 or (outlier[..., 3].item() == 8 and outlier.median() < 4)


# What the documents say


def test_paper_map_has_the_bits_per_value() -> None:
    """Each row of the table of quantisers there: head_dim 128, group_size 64, 16-bit scales."""
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d., ]+) \|$", PAPER_MAP.read_text(), re.MULTILINE)
    written = {name: [float(figure) for figure in figures.split(",")] for name, figures in rows}
    computed: dict[str, list[float]] = {}
    for name, bits in METHODS:
        computed.setdefault(name, []).append(quantizer_of(name, bits).bits_per_value(128))
    assert len(written) >= 6
    assert written == {name: computed[name] for name in written}
