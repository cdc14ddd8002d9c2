"""Packed codes: 8/bits to a byte."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specache_fx.runtime.quant.packing import pack, packed_width, unpack


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@settings(max_examples=20, deadline=None)
@given(channels=st.integers(1, 40), seed=st.integers(0, 99))
def test_pack_then_unpack_is_the_identity(bits: int, channels: int, seed: int) -> None:
    codes = torch.randint(
        0, 2**bits, (2, 3, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, math.ceil(channels * bits / 8)) == (2, 3, packed_width(channels, bits))
    assert torch.equal(unpack(packed, bits, channels), codes)


def test_pack_is_little_endian_and_zero_padded() -> None:
    codes = torch.tensor([1, 2, 3, 0, 3], dtype=torch.uint8)
    assert pack(codes, 2).tolist() == [0b00_11_10_01, 0b11]
    assert pack(codes % 2, 1).tolist() == [0b10101]
    assert pack(codes, 4).tolist() == [0x21, 0x03, 0x03]
