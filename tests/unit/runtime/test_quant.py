"""Laws 4 and 5 (`docs/laws.md`), and the other rules for every quantiser in the table."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.oracle_quant import quantize_dequantize_key, quantize_dequantize_value
from support.quant_inputs import (
    DTYPES,
    HEAD_DIMS,
    KINDS,
    METHODS,
    inputs,
    loss,
    quantize,
    quantizer_of,
    roundtrip,
)
from support.strategies import QUANT_FILLS, filled, key_masks
from torch import Tensor

from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.runtime.quant import QUANTIZERS, KVKind, Planes, make_quantizer
from specache_fx.runtime.quant.kivi import KiviQuantizer

over_methods = pytest.mark.parametrize(("name", "bits"), METHODS)
over_kinds = pytest.mark.parametrize("kind", KINDS)


@over_kinds
@over_methods
@settings(max_examples=15, deadline=None)
@given(drawn=inputs(dtypes=[torch.float32, torch.float64]))
@example(drawn=(8, filled((1, 1, 8, 20), torch.float32, "huge", 0)))
def test_what_comes_back_lies_within_the_error_bound(
    name: str, bits: int, kind: KVKind, drawn: tuple[int, Tensor]
) -> None:
    """Law 5. In float32 and float64, where next to nothing is lost by rounding scales and zeros."""
    group_size, x = drawn
    quantizer = quantizer_of(name, bits, group_size)
    planes, back = roundtrip(quantizer, kind, x)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    bound = quantizer.error_bound(planes, x.shape[3], kind).double().expand(x.shape)
    rounding = 3e-5 * x.double().abs().amax() + 1e-41 if x.numel() else 0.0
    assert ((back.double() - x.double()).abs() <= bound + rounding).all()


@over_kinds
@over_methods
def test_error_bound_is_of_the_size_of_a_token(name: str, bits: int, kind: KVKind) -> None:
    x, quantizer = filled((2, 2, 64, 64), torch.float32, "random", 0), quantizer_of(name, bits, 16)
    bound = quantizer.error_bound(quantize(quantizer, kind, x), 64, kind)
    assert bound.max() <= 2 * x.norm(dim=3).max()


@over_kinds
@over_methods
@settings(max_examples=15, deadline=None)
@given(
    drawn=inputs(
        fills=[f for f in QUANT_FILLS if f not in ("huge", "tiny")],
        head_dims=[1, 3, 8, 20, 48],
        group_sizes=(1, 5, 8, 16),
    )
)
@example(drawn=(8, filled((1, 2, 16, 80), torch.bfloat16, "random", 0)))
@example(drawn=(64, filled((1, 1, 64, 16), torch.float16, "outlier", 0)))
@example(drawn=(64, filled((1, 1, 64, 128), torch.float32, "random", 0)))
def test_what_comes_back_is_what_the_oracle_says(
    name: str, bits: int, kind: KVKind, drawn: tuple[int, Tensor]
) -> None:
    group_size, x = drawn
    _, back = roundtrip(quantizer_of(name, bits, group_size), kind, x)
    oracle = quantize_dequantize_key if kind == "key" else quantize_dequantize_value
    assert torch.equal(back, oracle(x, bits, group_size, name))


@over_kinds
@over_methods
@settings(max_examples=15, deadline=None)
@given(
    drawn=inputs(
        fills=[f for f in QUANT_FILLS if f not in ("huge", "tiny")],
        head_dims=[3, 8, 20],
        group_sizes=(2, 5, 8),
    ),
    data=st.data(),
)
def test_real_tokens_come_back_as_if_their_groups_had_no_padding(
    name: str, bits: int, kind: KVKind, drawn: tuple[int, Tensor], data: st.DataObject
) -> None:
    """Law 7: padding on any side counts for nothing, whatever it holds."""
    group_size, x = drawn
    quantizer = quantizer_of(name, bits, group_size)
    real = data.draw(key_masks(x.shape[0], x.shape[2])) if x.numel() else torch.ones(x.shape[0], 0).bool()
    shown = real[:, None, :, None]
    other = x.masked_fill(~shown, data.draw(st.sampled_from((0.0, -3e4, 7.5))))
    _, back = roundtrip(quantizer, kind, x, real)
    _, again = roundtrip(quantizer, kind, other, real)
    oracle = quantize_dequantize_key if kind == "key" else quantize_dequantize_value
    expected = oracle(x, bits, group_size, name, real)
    for found in (back, again):
        assert torch.equal(found.masked_fill(~shown, 0), expected.masked_fill(~shown, 0))


@over_kinds
@over_methods
@settings(max_examples=10, deadline=None)
@given(drawn=inputs())
def test_group_by_group_gives_the_planes_of_all_at_once(
    name: str, bits: int, kind: KVKind, drawn: tuple[int, Tensor]
) -> None:
    """Law 4, and that planes have as many rows for each group."""
    group_size, x = drawn
    quantizer = quantizer_of(name, bits, group_size)
    at_once = quantize(quantizer, kind, x)
    groups = [group for group in x.split(group_size, dim=2) if group.numel()]
    one_by_one: list[Planes] = []
    for group in groups:
        if kind == "key":
            one_by_one.append(quantizer.quantize_more_keys(group, one_by_one[0] if one_by_one else ()))
        else:
            one_by_one.append(quantizer.quantize_value(group))
    of_groups = len(at_once) - (quantizer.sequence_key_planes if kind == "key" else 0)
    for index, plane in enumerate(at_once):
        assert plane.dim() == 4 and plane.shape[:2] == x.shape[:2]
        if one_by_one and index < of_groups:
            assert len({planes[index].shape for planes in one_by_one}) == 1
            assert torch.equal(plane, torch.cat([planes[index] for planes in one_by_one], dim=2))
        elif one_by_one:
            assert plane.shape[2] == 1 and all(torch.equal(plane, planes[index]) for planes in one_by_one)


@over_kinds
@over_methods
def test_some_groups_come_back_as_among_all(name: str, bits: int, kind: KVKind) -> None:
    """What a store does: rows of whole groups are cut, batch rows permuted."""
    quantizer = quantizer_of(name, bits, 8)
    x = filled((3, 2, 24, 20), torch.bfloat16, "random", 0)
    planes, back = roundtrip(quantizer, kind, x)
    order = torch.tensor([2, 0])
    part = tuple(plane[order][:, :, : max(plane.shape[2] // 3 * 2, 1)] for plane in planes)
    dequantize = quantizer.dequantize_key if kind == "key" else quantizer.dequantize_value
    assert torch.equal(dequantize(part, 20, x.dtype), back[order][:, :, :16])


@pytest.mark.parametrize("dtype", DTYPES)
@over_kinds
@over_methods
def test_constant_group_comes_back(name: str, bits: int, kind: KVKind, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (0.0, 0.1, -7.77, 1e-7, info.max, info.min, info.tiny):
        x = torch.full((1, 2, 16, 20), value, dtype=dtype)
        quantizer = quantizer_of(name, bits, 8)
        planes, back = roundtrip(quantizer, kind, x)
        if kind in quantizer.exact_constants:
            assert torch.equal(back, x), value
        bound = quantizer.error_bound(planes, 20, kind).double().expand(x.shape)
        rounding = 2 * info.eps * abs(value) + 8 * info.tiny * info.eps
        assert ((back.double() - x.double()).abs() <= bound + rounding).all(), value


@over_kinds
@over_methods
def test_finite_numbers_come_back_finite(name: str, bits: int, kind: KVKind) -> None:
    gen = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        values = torch.tensor([info.max, info.min, info.max / 2, info.tiny, -info.tiny, 0.0, 1.0])
        x = values[torch.randint(len(values), (1, 2, 32, 80), generator=gen)].to(dtype)
        assert x.isfinite().all()
        planes, back = roundtrip(quantizer_of(name, bits, 16), kind, x)
        assert back.isfinite().all()
        assert all(plane.isfinite().all() for plane in planes)


@over_kinds
@over_methods
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_planes_have_the_forms_that_are_announced(name: str, bits: int, kind: KVKind, head_dim: int) -> None:
    quantizer = quantizer_of(name, bits, 32)
    for dtype in (torch.bfloat16, torch.float32):
        planes = quantize(quantizer, kind, torch.randn(2, 3, 64, head_dim).to(dtype))
        assert all(plane.is_contiguous() for plane in planes)
        forms = quantizer.plane_forms(head_dim, dtype, kind)
        assert [(2, 3, form.held(2), form.width) for form in forms] == [
            tuple(plane.shape) for plane in planes
        ]
        assert [form.dtype for form in forms] == [plane.dtype for plane in planes]
        assert sum(form.of_sequence for form in forms) == (kind == "key") * quantizer.sequence_key_planes
        nbytes = sum(plane.nbytes for plane, form in zip(planes, forms, strict=True) if not form.of_sequence)
        values = 2 * 3 * 64 * head_dim
        assert quantizer.bits_per_value(head_dim, dtype, kind) == pytest.approx(8 * nbytes / values)


@over_methods
def test_bits_per_value_of_a_pair_is_the_mean_of_key_and_value(name: str, bits: int) -> None:
    quantizer = quantizer_of(name, bits)
    each = [quantizer.bits_per_value(80, torch.bfloat16, kind) for kind in KINDS]
    assert quantizer.bits_per_value(80) == pytest.approx(sum(each) / 2)


@over_kinds
@pytest.mark.parametrize("name", [name for name in QUANTIZERS if len(QUANTIZERS[name].valid_bits) > 1])
def test_more_bits_lose_less(name: str, kind: KVKind) -> None:
    x = filled((1, 2, 128, 64), torch.float32, "random", 0)
    losses = [
        loss(x, roundtrip(quantizer_of(name, bits), kind, x)[1]) for bits in QUANTIZERS[name].valid_bits
    ]
    assert all(more < fewer / 2 for fewer, more in pairwise(losses))
    assert (losses[0] < 1) is QUANTIZERS[name].beats_zeros


@over_kinds
@over_methods
def test_input_and_planes_are_left_alone_and_share_no_memory(name: str, bits: int, kind: KVKind) -> None:
    x = torch.randn(1, 1, 8, 20)
    copy, quantizer = x.clone(), quantizer_of(name, bits, 8)
    planes, first = roundtrip(quantizer, kind, x)
    before = [plane.clone() for plane in planes]
    assert torch.equal(x, copy)
    x.zero_()
    dequantize = quantizer.dequantize_key if kind == "key" else quantizer.dequantize_value
    assert torch.equal(dequantize(planes, 20, x.dtype), first)
    assert all(torch.equal(plane, old) for plane, old in zip(planes, before, strict=True))


@over_kinds
@over_methods
def test_part_of_a_group_is_refused(name: str, bits: int, kind: KVKind) -> None:
    with pytest.raises(ValueError, match="9 tokens are not a multiple of group_size=8"):
        roundtrip(quantizer_of(name, bits, 8), kind, torch.zeros(1, 1, 9, 4))


@over_kinds
@pytest.mark.parametrize(
    ("name", "bits"), [(name, bits) for name, bits in METHODS if QUANTIZERS[name].code_form == "affine"]
)
def test_an_affine_quantiser_has_kivis_planes(name: str, bits: int, kind: KVKind) -> None:
    """`code_form="affine"` promises that KIVI's own dequantisation reads the planes."""
    quantizer = quantizer_of(name, bits, 8)
    planes, back = roundtrip(quantizer, kind, torch.randn(1, 2, 16, 20))
    kivi = KiviQuantizer(bits, 8)
    dequantize = kivi.dequantize_key if kind == "key" else kivi.dequantize_value
    assert torch.equal(dequantize(planes, 20, torch.float32), back)


def test_names_are_those_of_the_table() -> None:
    assert all(method.name == name for name, method in QUANTIZERS.items())


def test_make_quantizer_takes_bits_16_for_the_identity() -> None:
    assert make_quantizer(SpecacheConfig(bits=16)).name == "identity"
    assert make_quantizer(SpecacheConfig(bits=16, quantizer="nuq")).name == "identity"
    quantizer = make_quantizer(SpecacheConfig(bits=1, group_size=32))
    assert (quantizer.name, quantizer.bits, quantizer.group_size) == ("turboquant", 1, 32)


def test_make_quantizer_names_the_valid_ones() -> None:
    names = ", ".join(map(repr, QUANTIZERS))
    with pytest.raises(ConfigError, match=rf"quantizer='kivy' is not valid: choose one of {names}\."):
        make_quantizer(SpecacheConfig(quantizer="kivy"))
    with pytest.raises(ConfigError, match="quantizer='kivy'"):
        make_quantizer(SpecacheConfig(quantizer="kivy", bits=16))
    with pytest.raises(ConfigError, match="has no 2-bit codes: choose bits from 16"):
        make_quantizer(SpecacheConfig(quantizer="identity"))
    with pytest.raises(ConfigError, match="'nuq' has no 8-bit codes: choose bits from 1, 2, 4, or another"):
        make_quantizer(SpecacheConfig(quantizer="nuq", bits=8))
