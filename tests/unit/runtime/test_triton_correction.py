"""Pairs with a large share that Triton's attention reads from the host in the same step, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import strategies
from support.cases import examples
from support.kernel_cases import KernelCase, make_inputs, truth_of
from support.triton_mode import DEVICE, needs_triton

from specache_fx.runtime.kernels import DecodeInputs
from specache_fx.runtime.kernels.reference import ReferenceKernel
from specache_fx.runtime.kernels.triton import correction as triton_correction
from specache_fx.runtime.kernels.triton.kernel import TritonKernel

pytestmark = needs_triton
HERE = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="rows of `HostCache` in memory, which a GPU can't read"
)


def whole_pairs(case: KernelCase) -> DecodeInputs:
    """Inputs whose chosen pairs are read whole."""
    inputs = make_inputs(case)
    assert inputs.originals is not None
    return replace(inputs, originals=replace(inputs.originals, value_share=0.0))


@st.composite
def cases(draw: st.DrawFn) -> KernelCase:
    return KernelCase(
        bits=draw(st.sampled_from((1, 2, 4))),
        group_size=draw(st.sampled_from((8, 16, 64))),
        quantizer=draw(st.sampled_from(("kivi", "turboquant"))),
        groups=draw(st.integers(1, 3)),
        lanes=draw(st.integers(1, 2)),
        batch=draw(st.integers(1, 2)),
        num_kv_heads=draw(st.integers(1, 2)),
        num_kv_groups=draw(st.sampled_from((1, 2, 3))),
        key_dim=draw(st.sampled_from((8, 20, 64))),
        value_dim=draw(st.sampled_from((8, 20, 64))),
        window_len=draw(st.integers(0, 9)),
        top_k=draw(st.sampled_from((0, 1, 7))),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        content=draw(st.sampled_from(("random", "one_huge_score", "peaked", "outlier"))),
        masked=draw(st.sampled_from(("none", "left", "visible"))),
        bias=draw(st.sampled_from(("none", "by_head"))),
        softcap=draw(st.sampled_from((None, *strategies.softcaps))),
        sinks=draw(st.booleans()),
        independent=draw(st.booleans()),
        scored_lanes=draw(st.sampled_from((None, 0, 1))),
        reads=(draw(st.sampled_from((0, 1, 9, 60))), 0),
        seed=draw(strategies.seeds),
    )


USUAL: dict[str, Any] = {
    **{
        "bits": 1,
        "group_size": 16,
        "groups": 3,
        "lanes": 2,
        "batch": 2,
        "num_kv_heads": 2,
        "num_kv_groups": 2,
    },
    **{"key_dim": 64, "value_dim": 64, "window_len": 5, "top_k": 7, "reads": (9, 0)},
}


@HERE
@settings(max_examples=examples(6), deadline=None)
@given(case=cases())
@example(case=KernelCase(**USUAL))
@example(
    case=KernelCase(
        **USUAL | {"quantizer": "kivi", "content": "peaked", "masked": "visible", "bias": "by_head"}
    )
)
def test_corrected_attention_equals_the_dense_softmax(case: KernelCase) -> None:
    inputs, same = whole_pairs(case), whole_pairs(case)
    assert TritonKernel().misfit(inputs.form) is None
    out, scores = TritonKernel().attention(inputs)
    expected, expected_scores = ReferenceKernel().attention(same)
    truth = truth_of(inputs)
    u = torch.finfo(case.dtype).eps
    error = max(u, 2.0**-18) * (1 + truth.largest_logit)
    torch.testing.assert_close(out.double(), truth.out, rtol=0, atol=2 * truth.largest_value * error)
    torch.testing.assert_close(scores.double(), truth.scores.double(), rtol=2 * error, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=0, atol=2 * truth.largest_value * error)
    assert scores.shape == expected_scores.shape
    assert inputs.originals is not None and same.originals is not None
    assert inputs.originals.num_read.tolist() == same.originals.num_read.tolist()


@HERE
def test_so_many_pairs_are_read_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = whole_pairs(KernelCase(**USUAL | {"top_k": 0, "content": "peaked"}))
    assert inputs.originals is not None
    inputs = replace(inputs, originals=replace(inputs.originals, key_share=0.1))
    monkeypatch.setattr(triton_correction, "_MOST_SHARES", 0.2)  # it takes far larger margins to reach 2
    TritonKernel().attention(inputs)
    keys, values = inputs.originals.num_read.tolist()
    assert keys == values == 2 * inputs.query.shape[1] * inputs.key.shape[2]


@HERE
def test_values_that_are_chosen_apart_are_the_references() -> None:
    inputs = make_inputs(KernelCase(**USUAL | {"reads": (9, 4)}))
    reason = TritonKernel().misfit(inputs.form)
    assert reason is not None and "value_share" in reason
    apart = replace(inputs, originals=replace(inputs.originals, value_share=0.0, table=None))
    assert TritonKernel().misfit(apart.form) == reason
