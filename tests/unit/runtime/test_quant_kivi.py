"""KIVI's layout and the paper's formulas: `kivi` and `kivi-original`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from support.quant_inputs import KINDS, METHODS, inputs, quantizer_of, roundtrip
from support.strategies import filled
from torch import Tensor

from specache_fx.runtime.quant import KVKind, Quantizer
from specache_fx.runtime.quant.packing import unpack

AFFINE = ("kivi", "kivi-original")


def expand_to_elements(quantizer: Quantizer, kind: KVKind, plane: Tensor, head_dim: int) -> Tensor:
    """A scale or zero for each element, from KIVI's planes."""
    if kind == "key":
        return plane.double().repeat_interleave(quantizer.group_size, dim=2)
    return plane.double().repeat_interleave(min(quantizer.group_size, head_dim), dim=3)[..., :head_dim]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "bits"), [method for method in METHODS if method[0] in AFFINE])
@settings(max_examples=20, deadline=None)
@given(drawn=inputs())
@example(drawn=(8, filled((1, 1, 8, 20), torch.float16, "huge", 0)))
@example(drawn=(8, filled((1, 1, 8, 20), torch.bfloat16, "huge", 0)))
@example(drawn=(2, torch.tensor([[[[0.0], [6e-8]]]], dtype=torch.float16)))
def test_dequantised_value_lies_within_half_a_scale(
    name: str, bits: int, kind: KVKind, drawn: tuple[int, Tensor]
) -> None:
    """Law 5 once more, in 16 bits too: every rounding has its place in the bound."""
    group_size, x = drawn
    if (name, bits, x.dtype) == ("kivi-original", 1, torch.float16):
        x = x / 2  # the scale is the span: it has to fit the dtype
    quantizer = quantizer_of(name, bits, group_size)
    planes, back = roundtrip(quantizer, kind, x)
    packed, scale, zero = planes
    codes = unpack(packed, bits, x.shape[3])
    assert not codes.numel() or int(codes.max()) < 2**bits
    # In float64. The bound: half a scale, and what rounding of scale (times a code), zero and the result can add.
    info = torch.finfo(x.dtype)
    ulp = info.eps / 2 if x.dtype != torch.float32 else 4 * info.eps
    smallest = info.tiny * info.eps
    s, z = (expand_to_elements(quantizer, kind, plane, x.shape[3]) for plane in (scale, zero))
    assert (codes[(s == 0).expand_as(codes)] == 0).all()
    top = 2**bits - 1
    bound = s / 2 + ulp * (top * s + z.abs() + x.double().abs()) + smallest * (top + 2)
    assert ((back.double() - x.double()).abs() <= bound * (1 + 1e-6)).all()


def scalar_codes(
    values: list[float], bits: int, dtype: torch.dtype, original: bool
) -> tuple[list[int], float, float]:
    """Eq. 2 and 3 in plain Python (float64), scale and zero rounded to the KV dtype first."""

    def store(number: float) -> float:
        return torch.tensor(number, dtype=torch.float64).to(torch.float32).to(dtype).item()

    low, high = min(values), max(values)
    if bits == 1 and not original:
        zero, scale = store((3 * low + high) / 4), store((high - low) / 2)
    else:
        zero, scale = store(low), store((high - low) / (2**bits - 1))
    codes = [0 if scale == 0 else min(max(round((v - zero) / scale), 0), 2**bits - 1) for v in values]
    return codes, scale, zero


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("name", AFFINE)
def test_kivi_codes_equal_the_papers_formulas(name: str, bits: int, dtype: torch.dtype, ties: bool) -> None:
    gen = torch.Generator().manual_seed(bits)
    # Multiples of 1/8 make many exact ties, where half goes to even.
    shape = (2, 2, 16, 20)
    x = torch.randint(-40, 40, shape, generator=gen) / 8 if ties else torch.randn(shape, generator=gen)
    x = x.to(dtype)
    original = name == "kivi-original"
    quantizer = quantizer_of(name, bits, 8)
    codes, scale, zero = quantizer.quantize_key(x)
    codes = unpack(codes, bits, 20)
    for group in range(2):
        for channel in (0, 7, 19):
            got = codes[1, 0, group * 8 : group * 8 + 8, channel].tolist()
            values = x[1, 0, group * 8 : group * 8 + 8, channel].tolist()
            expected = scalar_codes(values, bits, dtype, original)
            assert (got, scale[1, 0, group, channel].item(), zero[1, 0, group, channel].item()) == expected
    codes, scale, zero = quantizer.quantize_value(x)
    assert scale.shape == (2, 2, 16, 3)
    codes = unpack(codes, bits, 20)
    for group, channels in enumerate([slice(0, 8), slice(8, 16), slice(16, 20)]):
        expected = scalar_codes(x[0, 1, 5, channels].tolist(), bits, dtype, original)
        got = codes[0, 1, 5, channels].tolist()
        assert (got, scale[0, 1, 5, group].item(), zero[0, 1, 5, group].item()) == expected


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_kivi_agrees_with_torchao_on_the_same_scale_and_zero(bits: int) -> None:
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
