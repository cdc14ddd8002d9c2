"""Caches that keep keys as they are: the reference's answer, without the reference's copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_cases import KernelCase, kernel_cases, make_inputs

from specache_fx.runtime.kernels import DecodeInputs
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.kernels.exact_pairs import ExactPairsKernel
from specache_fx.runtime.kernels.reference import ReferenceKernel
from specache_fx.runtime.quant.identity import IdentityQuantizer
from specache_fx.runtime.quant.keys_only import KeysOnlyQuantizer


def exact_inputs(case: KernelCase, *, keys_only: bool) -> DecodeInputs:
    """A case of codes with pairs in their place; what is staged is what was kept, as it is in a session."""
    inputs = make_inputs(case)
    kind = KeysOnlyQuantizer if keys_only else IdentityQuantizer
    quantizer = kind(16, case.group_size)
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.num_kv_heads, inputs.num_quantized)
    key = torch.randn(*shape, case.key_dim, generator=generator).to(case.dtype)
    value = torch.randn(*shape, case.value_dim, generator=generator).to(case.dtype)
    rows = inputs.staged_rows
    if rows is not None:
        assert inputs.staged_indices is not None
        places = inputs.staged_indices.clamp(min=0).long()[..., None]
        kept = value if keys_only else torch.cat([key, value], dim=3)
        rows = kept.gather(2, places.expand(-1, -1, -1, kept.shape[3]))
        rows[inputs.staged_indices < 0] = torch.nan  # an empty slot means nothing
    return replace(
        inputs,
        quantizer=quantizer,
        key_planes=quantizer.quantize_key(key),
        value_planes=quantizer.quantize_value(value),
        staged_rows=rows,
    )


@settings(max_examples=80)
@given(case=kernel_cases(), keys_only=st.booleans(), dtype=st.sampled_from((torch.float32, torch.float64)))
@example(case=KernelCase(top_k=0, masked="all", bias="hiding"), keys_only=True, dtype=torch.float32)
@example(case=KernelCase(empty_slots=2, window_len=0), keys_only=True, dtype=torch.float32)
def test_exact_pairs_are_attended_to_as_the_reference_does(
    case: KernelCase, keys_only: bool, dtype: torch.dtype
) -> None:
    kernel, inputs = (
        ExactPairsKernel(),
        exact_inputs(replace(case, dtype=dtype, reads=None), keys_only=keys_only),
    )
    assert (kernel.misfit(inputs.form) is None) == (inputs.num_quantized > 0)
    got, wanted = kernel.attention(inputs), ReferenceKernel().attention(inputs)
    for mine, reference in zip(got, wanted, strict=True):
        assert mine.dtype == reference.dtype
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("keys_only", [False, True])
def test_cpu_kernel_leaves_exact_pairs_to_it(keys_only: bool) -> None:
    inputs = exact_inputs(KernelCase(), keys_only=keys_only)
    got, wanted = (
        CpuKernel().or_else(ExactPairsKernel()).attention(inputs),
        ExactPairsKernel().attention(inputs),
    )
    assert all(map(torch.equal, got, wanted))


def test_codes_and_narrow_dtypes_go_to_the_reference() -> None:
    half = exact_inputs(KernelCase(dtype=torch.bfloat16), keys_only=True)
    mixed = replace(half, query=half.query.float())
    for inputs in (make_inputs(KernelCase()), half, mixed):
        kernel = ExactPairsKernel()
        assert kernel.misfit(inputs.form) is not None
        assert all(map(torch.equal, kernel.attention(inputs), ReferenceKernel().attention(inputs)))
