"""Triton's decode attention against a dense softmax in float64, over all of its forms."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import strategies
from support.cases import examples, nightly_unless
from support.decode_case import CaseShape, DecodeCase
from support.triton_mode import DEVICE, INSTALLED, needs_triton

from specache_fx.errors import KernelUnavailableError
from specache_fx.runtime.kernels import choose_kernel
from specache_fx.runtime.kernels.exact_pairs import ExactPairsKernel
from specache_fx.runtime.kernels.triton.arguments import arguments_of, merge_arguments, taken_by
from specache_fx.runtime.kernels.triton.kernel import TritonKernel
from specache_fx.runtime.quant.hadamard import rotation

if INSTALLED:
    import triton

pytestmark = [needs_triton, pytest.mark.gpu]
FORMS = ("mask", "visible", "bias", "softcap", "sinks", "hidden_row")


@st.composite
def shapes(draw: st.DrawFn) -> CaseShape:
    group_size = draw(st.sampled_from((4, 5, 8, 32, 64)))
    return CaseShape(
        lanes=draw(st.sampled_from((2, 1, 3))),
        batch=draw(st.integers(1, 2)),
        num_kv_heads=draw(st.integers(1, 2)),
        num_kv_groups=draw(st.sampled_from((1, 2, 3, 4))),
        key_dim=draw(st.sampled_from((16, 8, 20, 32))),
        value_dim=draw(st.sampled_from((16, 8, 20, 48))),
        bits=draw(st.sampled_from((1, 2, 4, 8))),
        group_size=group_size,
        quantizer=draw(st.sampled_from(("kivi", "turboquant"))),
        groups=draw(st.integers(0, 150 // group_size)),
        window_len=draw(st.sampled_from((0, 1, 5, 70))),
        top_k=draw(st.sampled_from((0, 1, 7, 40))),
        independent=draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        forms=frozenset(draw(st.lists(st.sampled_from(FORMS), max_size=4))),
        softcap=draw(st.sampled_from(strategies.softcaps)),
        seed=draw(st.integers(0, 999)),
    )


@settings(max_examples=examples(3), deadline=None)
@given(shape=shapes())
@example(shape=CaseShape(groups=0, window_len=0, top_k=0))
@example(shape=CaseShape(num_kv_groups=40, lanes=2, batch=1, num_kv_heads=1, groups=1))  # several query tiles
@example(
    shape=CaseShape(num_kv_groups=12, lanes=3, group_size=64, groups=5, quantizer="turboquant")
)  # and of keys
@example(shape=CaseShape(group_size=64, groups=2, key_dim=64, value_dim=64, forms=frozenset(FORMS)))
@example(shape=CaseShape(group_size=64, groups=2, quantizer="turboquant", key_dim=64, forms=frozenset(FORMS)))
@example(shape=CaseShape(group_size=5, groups=20, quantizer="turboquant", bits=1, dtype=torch.bfloat16))
@example(
    shape=CaseShape(group_size=4, groups=20, value_dim=48, bits=1)
)  # a scale for each channel's own group
def test_attention_equals_the_dense_softmax_within_its_budget(shape):
    case = DecodeCase(shape)
    inputs = case.inputs(DEVICE)
    assert TritonKernel().misfit(inputs.form) is None
    case.check(*TritonKernel().attention(inputs))


@pytest.mark.parametrize("softcap", strategies.softcaps)
def test_softcap_of_any_size_is_within_the_budget(softcap):
    shape = CaseShape(batch=1, num_kv_heads=1, groups=3, forms=frozenset(("softcap",)), softcap=softcap)
    case = DecodeCase(shape)
    case.check(*TritonKernel().attention(case.inputs(DEVICE)))


@pytest.mark.parametrize(
    ("block", "parts", "quantizer"),
    nightly_unless(
        lambda case: case in ((64, 2, "kivi"), (16, 4, "turboquant")),
        [(*tile, name) for tile in ((64, 1), (64, 2), (16, 4)) for name in ("turboquant", "kivi")],
    ),
)
def test_attention_is_the_same_for_all_tile_sizes(monkeypatch, block, parts, quantizer):
    if DEVICE.type != "cpu":
        pytest.skip("a GPU times its configs, and takes one")
    from specache_fx.runtime.kernels.triton.decode import partial_attention
    from specache_fx.runtime.kernels.triton.scores import selection_scores

    for kernel in (partial_attention, selection_scores):
        monkeypatch.setattr(kernel, "configs", [triton.Config({"BLOCK_N": block, "PARTS": parts})])
    shape = CaseShape(
        batch=1,
        num_kv_groups=4,
        group_size=64,
        groups=3,
        key_dim=32,
        value_dim=32,
        top_k=70,
        quantizer=quantizer,
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = DecodeCase(replace(shape, dtype=dtype, forms=frozenset(("mask",))))
        case.check(*TritonKernel().attention(case.inputs(DEVICE)))


def test_attention_leaves_its_inputs_alone():
    inputs = DecodeCase(CaseShape(forms=frozenset(FORMS))).inputs(DEVICE)
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}
    TritonKernel().attention(inputs)
    assert all(torch.equal(x, before[name]) for name, x in tensors.items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("bits", r"it reads KIVI's and TurboQuant's codes, not what bits=16 makes"),
        ("expand", r"latent attention"),
        ("wide", r"it takes 128 channels of this dtype and 8 lanes at most"),
        ("float64", r"it is for one of float32, bfloat16 and float16, and this has float64"),
        ("mixed", r"and this has float16 and float32"),
    ],
)
def test_other_inputs_are_refused_by_name_and_go_to_the_reference_by_themselves(change, reason):
    shape = CaseShape(groups=2, top_k=2)
    if change == "bits":
        shape = replace(shape, bits=16)
    if change == "wide":
        shape = replace(shape, key_dim=300)
    if change == "float64":
        shape = replace(shape, dtype=torch.float64)
    case = DecodeCase(shape)
    inputs = case.inputs(DEVICE)
    if change == "expand":
        inputs = replace(inputs, expand=lambda key, value: (key, value))
    if change == "mixed":
        inputs = replace(inputs, query=inputs.query.half())
    with pytest.raises(KernelUnavailableError, match=rf"kernel='triton' can't compute a layer .*{reason}"):
        TritonKernel().attention(inputs)
    out, scores = TritonKernel().or_else(ExactPairsKernel()).attention(inputs)
    assert out.dtype == inputs.query.dtype
    if change != "mixed":
        case.check(out, scores)


def test_rotated_queries_fit_into_float16():
    case = DecodeCase(CaseShape(groups=1, quantizer="turboquant", key_dim=128, dtype=torch.float16))
    inputs = case.inputs(DEVICE)
    aligned = rotation(128, DEVICE)[0][:, 7].sign() / inputs.key_planes[3].float().amax((0, 1, 2))
    inputs = replace(inputs, query=(8000 * aligned).to(inputs.query.dtype).expand_as(inputs.query))
    arguments = arguments_of(inputs)
    arguments |= merge_arguments(inputs, arguments)
    from specache_fx.runtime.kernels.triton.merge import rotate_queries

    code_query = arguments["code_query"]
    launched = code_query.shape[:3].numel()
    rotate_queries[(launched,)](out=code_query, **taken_by(rotate_queries, arguments))
    assert code_query.amax() > 1000
    assert code_query.half().isfinite().all()


def test_auto_leaves_the_interpreter_alone_and_a_name_takes_it():
    if DEVICE.type == "cpu":
        assert choose_kernel("auto", DEVICE).name != "triton"
    else:
        assert choose_kernel("auto", DEVICE).name == "triton"
    assert choose_kernel("triton", DEVICE).name == "triton"


def test_device_without_triton_is_refused_by_name():
    with pytest.raises(KernelUnavailableError, match=r"kernel='triton' can't run on mps: .* NVIDIA GPUs"):
        choose_kernel("triton", torch.device("mps"))
