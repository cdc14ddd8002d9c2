"""Triton's quantise-and-pack against `KiviQuantizer`'s planes: the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import strategies
from support.triton_mode import DEVICE, needs_triton

from specache_fx.runtime.quant import on_gpu
from specache_fx.runtime.quant.kivi import KiviQuantizer

pytestmark = [needs_triton, pytest.mark.gpu]


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(
        st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.sampled_from((3, 8, 16, 20, 80))
    ),
    group_size=st.sampled_from((1, 2, 5, 8, 64)),
    bits=strategies.low_bits,
    dtype=strategies.dtypes,
    fill=st.sampled_from(strategies.FILLS),
    seed=strategies.seeds,
    swapped=st.booleans(),
    padded=st.booleans(),
)
@example(
    shape=(1, 1, 1, 8),
    group_size=8,
    bits=1,
    dtype=torch.float32,
    fill="random",
    seed=0,
    swapped=False,
    padded=False,
)
@example(
    shape=(2, 2, 2, 20),
    group_size=5,
    bits=2,
    dtype=torch.bfloat16,
    fill="random",
    seed=0,
    swapped=True,
    padded=True,
)
def test_planes_are_the_reference_quantisers_to_the_bit(
    shape, group_size, bits, dtype, fill, seed, swapped, padded
):
    batch, heads, groups, dim = shape
    x = strategies.filled((batch, heads, groups * group_size, dim), dtype, fill, seed)
    if swapped:  # the layout of a projection's output
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    reference = KiviQuantizer(bits, group_size)  # on the CPU: ATen
    real = counted = None
    if padded:
        real = torch.arange(x.shape[2]) >= torch.tensor([x.shape[2] // 3, group_size + 1])[:batch, None]
        counted = reference._counted(real).to(DEVICE)
    sides = [(on_gpu.pack_keys(x.to(DEVICE), counted, bits, group_size), reference.quantize_key(x, real))]
    if group_size >= dim or group_size * bits % 8 == 0:
        sides.append((on_gpu.pack_values(x.to(DEVICE), bits, group_size), reference.quantize_value(x)))
    for planes, expected in sides:
        for plane, wanted in zip(planes, expected, strict=True):
            assert (plane.shape, plane.dtype) == (wanted.shape, wanted.dtype)
            assert plane.is_contiguous()
            assert torch.equal(plane.cpu(), wanted)


def test_groups_that_no_kernel_takes_are_left_to_aten():
    x = torch.zeros(1, 1, 2048, 16, device=DEVICE)
    assert not on_gpu.packs_keys(x, 2048)
    assert not on_gpu.packs_values(x, 1, 4)  # half a byte
    assert on_gpu.packs_keys(x, 64) == on_gpu.packs_values(x, 1, 64) == x.is_cuda
