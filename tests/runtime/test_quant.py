"""Laws 4 and 5 (DESIGN §2) for every quantiser in the table, and the exact formulas of KIVI's layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.runtime.quant import QUANTIZERS, make_quantizer
from specache_fx.runtime.quant.packing import pack, packed_width, unpack

METHODS = [(name, bits) for name, method in QUANTIZERS.items() for bits in method.valid_bits]
KINDS = ["key", "value"]
HEAD_DIMS = [1, 3, 8, 16, 20, 64, 80, 128]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FILLS = ["normal", "constant", "zeros", "huge", "tiny", "two_values", "offset", "outlier"]


def quantizer_of(name: str, bits: int, group_size: int = 64):
    return QUANTIZERS[name](bits, group_size)


def fill(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen)
    # bf16 and fp32: a group may span float32's range at most (KiviQuantizer's docstring).
    biggest = torch.finfo(torch.float16).max if dtype == torch.float16 else 1.6e38
    match kind:
        case "constant":
            x = torch.full(shape, [biggest, -biggest, 0.1, 3.0, -7.77][seed % 5])
        case "zeros":
            x = torch.zeros(shape)
        case "huge":
            x = torch.where(x > 0, biggest, -biggest) * torch.randint(0, 3, shape, generator=gen).clamp(max=1)
        case "tiny":
            x = x * torch.finfo(dtype).tiny
        case "two_values":
            x = torch.where(x > 0, 1.0, 2.0)
        case "offset":
            x = x + 1000
        case "outlier":
            x[..., :1] = 300.0
    return x.to(dtype)


@st.composite
def inputs(draw):
    group_size = draw(st.sampled_from([1, 2, 5, 8, 64]))
    groups = draw(st.integers(0, 3))
    shape = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        groups * group_size,
        draw(st.sampled_from(HEAD_DIMS)),
    )
    x = fill(draw(st.sampled_from(FILLS)), shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    if draw(
        st.booleans()
    ):  # the layout of a projection's output: strides of [batch, tokens, heads, head_dim]
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return group_size, x


def roundtrip(quantizer, kind: str, x: torch.Tensor):
    planes = getattr(quantizer, f"quantize_{kind}")(x)
    return planes, getattr(quantizer, f"dequantize_{kind}")(planes, x.shape[3], x.dtype)


def expand_to_elements(quantizer, kind: str, plane: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A scale or zero for each element, from KIVI's planes."""
    if kind == "key":
        return plane.double().repeat_interleave(quantizer.group_size, dim=2)
    return plane.double().repeat_interleave(min(quantizer.group_size, head_dim), dim=3)[..., :head_dim]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "bits"), METHODS)
@settings(max_examples=20, deadline=None)
@given(drawn=inputs())
@example(drawn=(8, fill("huge", (1, 1, 8, 20), torch.float16, 0)))
@example(drawn=(8, fill("huge", (1, 1, 8, 20), torch.bfloat16, 0)))
@example(drawn=(2, torch.tensor([[[[0.0], [6e-8]]]], dtype=torch.float16)))
def test_dequantised_value_lies_within_half_a_scale(name, bits, kind, drawn):
    group_size, x = drawn
    quantizer = quantizer_of(name, bits, group_size)
    planes, back = roundtrip(quantizer, kind, x)
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    if name == "identity":
        assert torch.equal(back, x)
        return
    packed, scale, zero = planes
    codes = unpack(packed, bits, x.shape[3])
    assert not codes.numel() or int(codes.max()) < 2**bits
    # In float64. The bound: half a scale, and what rounding of scale (times a code), zero and the result can
    # add.
    info = torch.finfo(x.dtype)
    ulp = info.eps / 2 if x.dtype != torch.float32 else 4 * info.eps
    smallest = info.tiny * info.eps
    s, z = (expand_to_elements(quantizer, kind, plane, x.shape[3]) for plane in (scale, zero))
    assert (codes[(s == 0).expand_as(codes)] == 0).all()
    top = 2**bits - 1
    bound = s / 2 + ulp * (top * s + z.abs() + x.double().abs()) + smallest * (top + 2)
    # Overflow of the result (a value that rounds up past the largest of its dtype) is the dtype's, not ours.
    error = (back.double().clamp(info.min, info.max) - x.double()).abs()
    assert (error <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "bits"), METHODS)
@settings(max_examples=10, deadline=None)
@given(drawn=inputs())
def test_group_by_group_gives_the_planes_of_all_at_once(name, bits, kind, drawn):
    group_size, x = drawn
    quantizer = quantizer_of(name, bits, group_size)
    quantize = getattr(quantizer, f"quantize_{kind}")
    at_once = quantize(x)
    one_by_one = [quantize(x[:, :, start : start + group_size]) for start in range(0, x.shape[2], group_size)]
    for index, plane in enumerate(at_once):
        assert plane.dim() == 4
        if one_by_one:
            assert torch.equal(plane, torch.cat([planes[index] for planes in one_by_one], dim=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "bits"), METHODS)
def test_constant_group_comes_back_exactly(name, bits, kind, dtype):
    for value in (
        0.0,
        0.1,
        -7.77,
        1e-7,
        torch.finfo(dtype).max,
        torch.finfo(dtype).min,
        torch.finfo(dtype).tiny,
    ):
        x = torch.full((1, 2, 16, 20), value, dtype=dtype)
        _, back = roundtrip(quantizer_of(name, bits, 8), kind, x)
        assert torch.equal(back, x), value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "bits"), METHODS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_planes_hold_the_bytes_that_are_announced(name, bits, kind, head_dim):
    quantizer = quantizer_of(name, bits, 32)
    planes, _ = roundtrip(quantizer, kind, torch.randn(2, 3, 64, head_dim).bfloat16())
    assert all(plane.is_contiguous() for plane in planes)
    per_group = quantizer.bytes_per_group(head_dim, 2, kind)
    assert sum(plane.nbytes for plane in planes) == 2 * 3 * 2 * per_group


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "bits"), METHODS)
def test_planes_do_not_share_memory_with_the_input(name, bits, kind):
    x = torch.randn(1, 1, 8, 8)
    planes, before = roundtrip(quantizer_of(name, bits, 8), kind, x)
    before = before.clone()
    x.zero_()
    assert torch.equal(getattr(quantizer_of(name, bits, 8), f"dequantize_{kind}")(planes, 8, x.dtype), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "bits"), METHODS)
def test_part_of_a_group_is_refused(name, bits, kind):
    with pytest.raises(ValueError, match="9 tokens are not a multiple of group_size=8"):
        roundtrip(quantizer_of(name, bits, 8), kind, torch.zeros(1, 1, 9, 4))


def scalar_codes(values: list[float], bits: int, dtype: torch.dtype) -> tuple[list[int], float, float]:
    """Eq. 2 and 3 in plain Python (float64), scale and zero rounded to the KV dtype first."""

    def store(number: float) -> float:
        return torch.tensor(number, dtype=torch.float64).to(torch.float32).to(dtype).item()

    low, high = min(values), max(values)
    if bits == 1:
        zero, scale = store((3 * low + high) / 4), store((high - low) / 2)
    else:
        zero, scale = store(low), store((high - low) / (2**bits - 1))
    codes = [0 if scale == 0 else min(max(round((v - zero) / scale), 0), 2**bits - 1) for v in values]
    return codes, scale, zero


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kivi_codes_equal_the_papers_formulas(bits, dtype, ties):
    gen = torch.Generator().manual_seed(bits)
    # Multiples of 1/8 make many exact ties, where half goes to even.
    shape = (2, 2, 16, 20)
    x = torch.randint(-40, 40, shape, generator=gen) / 8 if ties else torch.randn(shape, generator=gen)
    x = x.to(dtype)
    quantizer = quantizer_of("kivi", bits, 8)
    codes, scale, zero = quantizer.quantize_key(x)
    codes = unpack(codes, bits, 20)
    for group in range(2):
        for channel in (0, 7, 19):
            got = codes[1, 0, group * 8 : group * 8 + 8, channel].tolist()
            values = x[1, 0, group * 8 : group * 8 + 8, channel].tolist()
            expected = scalar_codes(values, bits, dtype)
            assert (got, scale[1, 0, group, channel].item(), zero[1, 0, group, channel].item()) == expected
    codes, scale, zero = quantizer.quantize_value(x)
    assert scale.shape == (2, 2, 16, 3)
    codes = unpack(codes, bits, 20)
    for group, channels in enumerate([slice(0, 8), slice(8, 16), slice(16, 20)]):
        expected = scalar_codes(x[0, 1, 5, channels].tolist(), bits, dtype)
        got = codes[0, 1, 5, channels].tolist()
        assert (got, scale[0, 1, 5, group].item(), zero[0, 1, 5, group].item()) == expected


def test_one_bit_levels_are_the_quarter_points():
    """Eq. 3: below the middle (3 min + max) / 4, above it (min + 3 max) / 4, for the maximum too."""
    x = torch.tensor([0.0, 1.0, 3.0, 4.0]).reshape(1, 1, 4, 1)
    _, back = roundtrip(quantizer_of("kivi", 1, 4), "key", x)
    assert back.flatten().tolist() == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kivi_agrees_with_torchao_on_the_same_scale_and_zero(bits):
    """On x - zero: torchao's own rounding, clamping, grouping and dequantisation."""
    from torchao.quantization import quant_primitives as primitives  # of the `test` extra

    x = torch.randn(2, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    packed, scale, zero = quantizer_of("kivi", bits, 32).quantize_key(x)
    shifted = x - zero.repeat_interleave(32, dim=2)
    block, no_zero, top = (1, 1, 32, 1), torch.zeros_like(scale, dtype=torch.int32), 2**bits - 1
    codes = primitives.quantize_affine(shifted, block, scale, no_zero, torch.uint8, 0, top)
    ours = unpack(packed, bits, 32)
    near_tie = ((shifted / scale.repeat_interleave(32, dim=2)) % 1 - 0.5).abs() < 1e-4
    assert torch.equal(codes[~near_tie], ours[~near_tie])
    theirs = primitives.dequantize_affine(ours, block, scale, no_zero, torch.uint8, 0, top)
    back = quantizer_of("kivi", bits, 32).dequantize_key((packed, scale, zero), 32, torch.float32)
    torch.testing.assert_close(back, theirs + zero.repeat_interleave(32, dim=2), rtol=1e-6, atol=1e-6)
    if bits > 1:
        theirs_scale, _ = primitives.choose_qparams_affine(
            shifted, primitives.MappingType.ASYMMETRIC, block, torch.uint8, 0, top
        )
        torch.testing.assert_close(scale, theirs_scale.view_as(scale), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@settings(max_examples=20, deadline=None)
@given(channels=st.integers(1, 40), seed=st.integers(0, 99))
def test_pack_then_unpack_is_the_identity(bits, channels, seed):
    codes = torch.randint(
        0, 2**bits, (2, 3, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, math.ceil(channels * bits / 8)) == (2, 3, packed_width(channels, bits))
    assert torch.equal(unpack(packed, bits, channels), codes)


def test_pack_is_little_endian_and_zero_padded():
    codes = torch.tensor([1, 2, 3, 0, 3], dtype=torch.uint8)
    assert pack(codes, 2).tolist() == [0b00_11_10_01, 0b11]
    assert pack(codes % 2, 1).tolist() == [0b10101]
    assert pack(codes, 4).tolist() == [0x21, 0x03, 0x03]


def test_make_quantizer_takes_bits_16_for_the_identity():
    assert make_quantizer(SpecacheConfig(bits=16)).name == "identity"
    quantizer = make_quantizer(SpecacheConfig(bits=1, group_size=32))
    assert (quantizer.name, quantizer.bits, quantizer.group_size) == ("kivi", 1, 32)


def test_make_quantizer_names_the_valid_ones():
    with pytest.raises(
        ConfigError, match=r"quantizer='kivy' is not valid: choose one of 'kivi', 'identity'\."
    ):
        make_quantizer(SpecacheConfig(quantizer="kivy"))
    with pytest.raises(ConfigError, match="quantizer='kivy'"):
        make_quantizer(SpecacheConfig(quantizer="kivy", bits=16))
    with pytest.raises(ConfigError, match="has no 2-bit codes: choose bits from 16"):
        make_quantizer(SpecacheConfig(quantizer="identity"))
