"""Every kernel against the same formula in float64, within an error budget that follows from its arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from support import strategies
from support.cases import examples
from support.kernel_cases import CONTENTS, KernelCase, kernel_cases, make_inputs, truth_of
from support.threads import at_once, num_threads
from torch import Tensor

from specache_fx import _log
from specache_fx.errors import ConfigError, KernelUnavailableError
from specache_fx.runtime.kernels import KERNELS, DecodeInputs, Kernel, check_kernel, choose_kernel
from specache_fx.runtime.kernels.cpu import CpuKernel
from specache_fx.runtime.kernels.cpu.arguments import SCORE_TOLERANCE
from specache_fx.runtime.kernels.exact_pairs import ExactPairsKernel
from specache_fx.runtime.kernels.reference import ReferenceKernel
from specache_fx.runtime.native import cpp_build
from specache_fx.runtime.native.cpp_build import SOURCES
from specache_fx.runtime.quant.hadamard import block_size

CPU = torch.device("cpu")
# The processor may lack the best instruction set; the portable code is always there.
TESTED: dict[str, Kernel] = {
    "reference": ReferenceKernel(),
    **{f"cpu_{name}": CpuKernel(name) for name in cpp_build.usable_instruction_sets()},
}
CPU_KERNELS = [name for name in TESTED if name.startswith("cpu")]


def check_budget(kernel: Kernel, inputs: DecodeInputs) -> None:
    """Compare with float64.

    `u` is half the spacing of the dtype at 1. The reference rounds dequantised pairs and its output to the dtype and
    computes in float32: its error is some `u` of the values and, through the softmax, of the logits.

    The CPU kernel rounds no pairs, but factors of codes: see `rounding_of_factors`.
    """
    out, scores = kernel.attention(inputs)
    truth = truth_of(inputs)
    assert out.dtype == inputs.query.dtype and out.shape == truth.out.shape
    assert scores.dtype == torch.float32 and scores.shape == truth.scores.shape
    assert bool(out.isfinite().all()) and bool(scores.isfinite().all())
    u = torch.finfo(inputs.query.dtype).eps / 2
    error, coarse, of_values = max(u, 2.0**-20) * (1 + truth.largest_logit), 0.0, 0.0
    if isinstance(kernel, CpuKernel) and inputs.num_quantized:
        of_scores, coarse, of_values = rounding_of_factors(inputs)
        error += of_scores
    # One in 64 probabilities at most is rounded coarsely and off at once: hence the 1/8.
    close(out, truth.out, 0, 2 * truth.largest_value * (error + coarse / 8 + of_values))
    close(scores, truth.scores, 2 * error + 2 * coarse, 1e-6)
    if inputs.originals is not None:
        assert inputs.originals.num_read.tolist() == truth.num_read
    if inputs.key_mask is not None:
        hidden = ~inputs.key_mask[None, :, None].expand(*scores.shape[:3], -1)
        assert bool((scores[..., :-1][hidden] == -1).all())


def rounding_of_factors(inputs: DecodeInputs) -> tuple[float, float, float]:
    """What the CPU kernel's integers cost, five standard deviations each.

    A factor is rounded to a step, evenly spread over it: a standard deviation of step / sqrt(12). Codes less their mean
    have, evenly spread over their range, one of range / sqrt(12). A score sums `key_dim` products of the two.

    Returns:
        The error of scores from factors of two bytes; the further one from one byte (bfloat16 at 1 and 2 bits), which
        only probabilities below 1/64 have; and the output's from rounding probabilities, as a share of the values.
    """
    bits, key_dim = inputs.quantizer.bits, inputs.query.shape[-1]
    largest_query = inputs.query.abs().max()
    if inputs.quantizer.code_form == "centred":  # balanced, rotated, and divided by as much as keys lack
        balance = inputs.key_planes[3].float().max()
        largest_query = balance * inputs.query.float().norm(dim=-1).max() * block_size(key_dim) ** 0.5
    largest_factor = float(largest_query * inputs.key_planes[1].abs().max() * inputs.scale)
    of_scores = 5 * largest_factor / 32639 * (2**bits - 1) * key_dim**0.5 / 12
    narrow = inputs.query.dtype == torch.bfloat16 and bits <= 2
    # No probability above 1/64 is rounded, and as many steps as 64 of them have are spread over all tokens.
    of_values = 5 * inputs.num_quantized**0.5 / 12 / 64 / (126 if narrow else 32639)
    return of_scores, 5 * SCORE_TOLERANCE if narrow else 0.0, of_values


def close(got: Tensor, wanted: Tensor, relative: float, absolute: float) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize("name", TESTED)
@settings(max_examples=examples(15))
@given(case=kernel_cases())
@example(case=KernelCase(group_size=127, groups=2))  # no multiple of a vector
@example(case=KernelCase(bits=1, group_size=64, groups=40, key_dim=128, value_dim=128, dtype=torch.bfloat16))
@example(case=KernelCase(bits=1, group_size=32, groups=80, key_dim=128, value_dim=128, dtype=torch.bfloat16))
@example(
    case=KernelCase(bits=2, group_size=32, groups=80, key_dim=64, value_dim=64)
)  # half a vector of lanes
@example(case=KernelCase(bits=2, group_size=64, groups=20, key_dim=256, value_dim=256))  # a vector a row
@example(case=KernelCase(bits=8, group_size=16, groups=140, key_dim=128, value_dim=128))  # chunks
@example(case=KernelCase(bits=4, group_size=4096, groups=1, content="constant"))  # the longest sums
@example(case=KernelCase(bits=4, group_size=4, groups=3, value_dim=20))  # a shorter last group of channels
@example(case=KernelCase(groups=0, window_len=0))
@example(case=KernelCase(1, 64, "turboquant", groups=40, key_dim=128, value_dim=128, dtype=torch.bfloat16))
@example(case=KernelCase(2, 32, "turboquant", groups=80, key_dim=64, value_dim=64))
@example(case=KernelCase(2, 127, "turboquant", groups=2, key_dim=80, value_dim=20))
@example(case=KernelCase(8, 16, "turboquant", groups=140, key_dim=256, value_dim=256, softcap=2.0))
@example(case=KernelCase(masked="all", bias="hiding", independent=True))
@example(case=KernelCase(lanes=1, groups=140, num_kv_groups=4, scored_lanes=0, reads=(40, 9)))
@example(
    case=KernelCase(1, 64, "turboquant", 40, 1, key_dim=64, value_dim=64, scored_lanes=0, reads=(200, 20))
)
@example(case=KernelCase(lanes=2, groups=9, masked="visible", aggregation="max", sinks=True, reads=(9, 9)))
@example(case=KernelCase(lanes=1, content="one_huge_score", softcap=30.0, masked="left", reads=(1000, 5)))
def test_kernel_is_within_its_error_budget(name: str, case: KernelCase) -> None:
    check_budget(TESTED[name], make_inputs(case))


@pytest.mark.parametrize("softcap", strategies.softcaps)
@pytest.mark.parametrize("quantizer", ["kivi", "turboquant"])
@pytest.mark.parametrize("name", TESTED)
def test_softcap_of_any_size_is_within_the_error_budget(name: str, quantizer: str, softcap: float) -> None:
    check_budget(TESTED[name], make_inputs(KernelCase(quantizer=quantizer, softcap=softcap)))


@pytest.mark.parametrize("size", [1e4, 3e5, 1e7, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantizer", ["kivi", "turboquant"])
@pytest.mark.parametrize("name", TESTED)
def test_huge_scores_leave_the_largest_ones_value(
    name: str, quantizer: str, dtype: torch.dtype, size: float
) -> None:
    # Integers of 16 bits round scores of a million by tens: e to the power of that overflowed, and the sum lost itself.
    case = KernelCase(2, 32, quantizer, groups=12, lanes=1, num_kv_groups=4, key_dim=64, dtype=dtype)
    inputs = make_inputs(case)
    inputs = replace(inputs, query=(inputs.query.float() * size).to(dtype))
    out, scores = TESTED[name].attention(inputs)
    truth = truth_of(inputs)
    close(out, truth.out, 0, 0.01 * truth.largest_value)
    close(scores, truth.scores, 0, 0.01)


@pytest.mark.parametrize("quantizer", ["kivi", "turboquant"])
@pytest.mark.parametrize("name", CPU_KERNELS)
def test_flushed_subnormal_numbers_cost_float16_nothing(name: str, quantizer: str) -> None:
    # Scales of values of 3e-5 are subnormal in float16, and far from that in float32.
    inputs = make_inputs(KernelCase(quantizer=quantizer, dtype=torch.float16, num_kv_heads=1, top_k=0))
    side = 3e-5 * torch.randn(1, 1, inputs.num_quantized, 16, generator=torch.Generator().manual_seed(0))
    inputs = replace(inputs, value_planes=inputs.quantizer.quantize_value(side.half()))
    assert bool((inputs.value_planes[1] < torch.finfo(torch.float16).smallest_normal).any())
    wanted = TESTED[name].attention(inputs)
    torch.set_flush_denormal(True)
    try:
        got = TESTED[name].attention(inputs)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("quantizer", ["kivi", "turboquant"])
@pytest.mark.parametrize("name", CPU_KERNELS)
def test_long_context_in_bfloat16_is_within_its_error_budget(
    name: str, quantizer: str, bits: int, content: str
) -> None:
    case = KernelCase(bits, 64, quantizer, groups=40, key_dim=64, value_dim=64, content=content)
    case = replace(case, dtype=torch.bfloat16)
    check_budget(TESTED[name], make_inputs(replace(case, num_kv_heads=1)))


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_rounding_to_one_byte_shifts_nothing(name: str) -> None:
    # 4,032 of 4,096 tokens have a probability far below half a step of their block, and all of them the same value.
    case = KernelCase(
        2,
        64,
        groups=64,
        num_kv_heads=1,
        key_dim=64,
        value_dim=64,
        content="many_small",
        top_k=0,
        window_len=0,
    )
    inputs = make_inputs(replace(case, dtype=torch.bfloat16))
    truth = truth_of(inputs)
    error = TESTED[name].attention(inputs)[0].double() - truth.out
    assert abs(float(error.mean())) < 2e-3 * truth.largest_value
    assert float(error.pow(2).mean().sqrt()) < 4e-3 * truth.largest_value


@pytest.mark.parametrize("reads", [None, (9, 4)], ids=["codes", "reads"])
@pytest.mark.parametrize(("num_kv_heads", "threads"), [(1, 2), (5, 3), (3, 7)])
@pytest.mark.parametrize("name", CPU_KERNELS)
def test_threads_change_nothing_but_rounding(
    name: str, num_kv_heads: int, threads: int, reads: tuple[int, int] | None
) -> None:
    # Some heads whole, others in parts. Parts know less of the whole mass: other pairs are read in float arithmetic.
    shape = {"num_kv_heads": num_kv_heads, "num_kv_groups": 4, "key_dim": 64, "value_dim": 64, "reads": reads}
    inputs = make_inputs(KernelCase(groups=300, **shape))
    alone = TESTED[name].attention(inputs)
    with num_threads(threads):
        for _ in range(20):  # whoever comes first
            together = TESTED[name].attention(inputs)
            for one, two in zip(alone, together, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=3e-5)


def test_python_threads_do_not_disturb_each_other() -> None:
    cases = [make_inputs(KernelCase(groups=20 + i, seed=i)) for i in range(4)]
    wanted = [KERNELS["cpu"].attention(inputs) for inputs in cases]

    def work(i: int) -> None:
        for _ in range(20):
            got = KERNELS["cpu"].attention(cases[i])
            assert all(torch.equal(a, b) for a, b in zip(got, wanted[i], strict=True))

    at_once([partial(work, i) for i in range(len(cases))])


@pytest.mark.parametrize("what", ["query", "window_key", "window_value", "scale"])
@pytest.mark.parametrize("name", TESTED)
def test_nan_comes_out_as_nan(name: str, what: str) -> None:
    inputs = make_inputs(KernelCase())
    if what == "scale":
        inputs.key_planes[1][:] = torch.nan
    else:
        getattr(inputs, what)[:] = torch.nan
    assert bool(TESTED[name].attention(inputs)[0].isnan().all())


def test_what_the_cpu_kernel_is_not_made_for_is_refused_by_name_and_goes_to_the_reference_by_itself() -> None:
    kernel, inputs = CpuKernel(), make_inputs(KernelCase())
    doubles = {"query": inputs.query.double()}
    straddling = make_inputs(KernelCase(bits=1, group_size=4, groups=8, value_dim=20))
    latent = replace(inputs, expand=lambda key, value: (key, value))
    # Sums of 32 bits would overflow in a group of so many tokens.
    huge = make_inputs(KernelCase(bits=4, group_size=4104, groups=1, num_kv_heads=1))
    assert kernel.misfit(inputs.form) is None
    for other, reason in (
        (replace(inputs, **doubles), "this has float32 and float64"),
        (straddling, "codes of two groups"),
        (latent, "latent attention"),
        (huge, "in groups of 4,096 at most"),
    ):
        with pytest.raises(KernelUnavailableError, match=rf"kernel='cpu' can't compute a layer .*{reason}"):
            kernel.attention(other)
        by_itself = kernel.or_else(ExactPairsKernel()).attention(other)
        for got, wanted in zip(by_itself, ReferenceKernel().attention(other), strict=True):
            assert torch.equal(got, wanted)


def test_auto_takes_the_cpu_kernel_on_the_cpu_and_the_reference_elsewhere() -> None:
    assert choose_kernel("auto", CPU).name == "cpu"
    assert choose_kernel("auto", torch.device("meta")).name == "reference"
    with pytest.raises(
        KernelUnavailableError, match=r"kernel='cpu' can't run on meta: it is for tensors on the CPU"
    ):
        choose_kernel("cpu", torch.device("meta"))
    with pytest.raises(ConfigError, match="'fast' is not known"):
        check_kernel("fast")


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a new machine: an empty cache, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_build, "load_library", cpp_build.load_library.__wrapped__)
    import specache_fx.runtime.kernels.cpu.kernel as module

    monkeypatch.setattr(module, "load_library", cpp_build.load_library)
    monkeypatch.setitem(KERNELS, "cpu", CpuKernel())
    return tmp_path


def test_without_a_compiler_auto_warns_once_and_a_named_kernel_is_an_error(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    _log.forget_warnings()
    for _ in range(2):
        assert choose_kernel("auto", CPU).name != "cpu"
    assert [record.message for record in caplog.records if "will be slow" in record.message] == [
        "Attention will be slow: the CPU kernel can't run (CXX='/no/such/compiler' is not a program; install a C++"
        f" compiler, or name one by CXX), so kernel={choose_kernel('auto', CPU).name!r} takes its place."
    ]
    with pytest.raises(
        KernelUnavailableError, match=r"CXX='/no/such/compiler' is not a program; install a C\+\+"
    ):
        choose_kernel("cpu", CPU)


def test_compiler_that_fails_is_named(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = nothing_built / "broken"
    compiler.write_text("#!/bin/sh\necho 'error: no room left' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        KernelUnavailableError, match=r"broken failed: error: no room left; set CXX to another"
    ):
        choose_kernel("cpu", CPU)
    assert not list(nothing_built.rglob("*.so"))


@pytest.mark.nightly  # it builds the kernel
def test_compiler_that_lacks_the_best_instruction_set_builds_the_next(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = cpp_build.usable_instruction_sets()[0]
    newer = cpp_build.InstructionSet("newer", ("-mno-compiler-knows-this",))
    monkeypatch.setattr(cpp_build, "INSTRUCTION_SETS", {"newer": newer} | cpp_build.INSTRUCTION_SETS)
    assert cpp_build.usable_instruction_sets()[0] == "newer"
    assert choose_kernel("cpu", CPU).name == "cpu"
    (built,) = nothing_built.rglob("*.so")
    assert built.name.startswith(f"attention_{best}_")


def test_library_depends_on_the_sources_the_flags_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("1")

    def name(with_torch: bool = False, folder: Path = tmp_path) -> str:
        return cpp_build.prebuilt_name("a", folder, "portable", with_torch)

    first = name()
    assert first == name() != name(with_torch=True)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "a.cpp").write_text("1")
    assert first == name(folder=tmp_path / "moved")
    (tmp_path / "a.h").write_text("2")
    assert first != name()


def test_python_and_c_agree_on_the_inputs() -> None:
    import ctypes

    from specache_fx.runtime.kernels.cpu.abi import InputsC

    library = cpp_build.load_library("attention", SOURCES, "portable")
    library.specache_inputs_size.restype = ctypes.c_int64
    assert library.specache_inputs_size() == ctypes.sizeof(InputsC)
    struct = (SOURCES / "inputs.h").read_text().partition("struct SpecacheInputs {")[2].partition("};")[0]
    members = re.sub(r"//.*", "", struct)
    declared = [name for line in members.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line)]
    assert declared == [name.rstrip("_") for name, _ in InputsC._fields_]
