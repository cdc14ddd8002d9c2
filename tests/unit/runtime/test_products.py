"""Products of a few rows: PyTorch's numbers within rounding, on every instruction set, and without a compiler."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.process import python
from support.threads import at_once, num_threads
from torch import Tensor

from specache_fx.runtime import ops  # noqa: F401  (defines the operator)
from specache_fx.runtime.native import cpp_build, graph_ops, products

_i64, _address = ctypes.c_int64, ctypes.c_void_p


class _ProductsC(ctypes.Structure):
    """`SpecacheProducts` of products.cpp."""

    _fields_ = (
        *((name, _i64) for name in ("num_rows", "in", "bfloat16", "int8", "num_weights", "threads")),
        ("rows", _address),
        ("weights", _address * products.MAX_WEIGHTS),
        ("out", _i64 * products.MAX_WEIGHTS),
        ("results", _address * products.MAX_WEIGHTS),
    )


def has_tiles(instruction_set: str) -> bool:
    """Whether AMX multiplies bfloat16."""
    library = cpp_build.load_library("products", cpp_build.SOURCES, instruction_set)
    library.specache_has_tiles.restype = ctypes.c_bool
    return bool(library.specache_has_tiles())


def multiply_in(
    instruction_set: str, rows: Tensor, weights: list[Tensor], results: list[Tensor] | None = None
) -> list[Tensor]:
    """`rows @ weight.T` of up to `products.MAX_WEIGHTS` weights, to `results` where they are given."""
    rows = rows.contiguous()
    if results is None:
        results = [torch.empty((len(rows), len(weight)), dtype=rows.dtype) for weight in weights]
    pointers = _address * products.MAX_WEIGHTS
    arguments = _ProductsC(
        *(
            *rows.shape,
            rows.dtype is torch.bfloat16,
            weights[0].dtype is torch.int8,
            len(weights),
            torch.get_num_threads(),
            rows.data_ptr(),
        ),
        pointers(*(weight.data_ptr() for weight in weights)),
        (_i64 * products.MAX_WEIGHTS)(*map(len, weights)),
        pointers(*(result.data_ptr() for result in results)),
    )
    cpp_build.load_library("products", cpp_build.SOURCES, instruction_set).specache_products(
        ctypes.byref(arguments)
    )
    return results


def multiply(rows: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """As a graph does, in C++."""
    assert graph_ops.load() is not None
    results = torch.ops.specache.products(rows, *weights)
    return [results] if len(weights) == 1 else list(results)


def check(rows: Tensor, weights: list[Tensor], got: list[Tensor]) -> None:
    """Sums of float32 in any order, rounded once: an error of the sum of magnitudes, and a step of the dtype."""
    assert len(got) == len(weights)
    for weight, result in zip(weights, got, strict=True):
        wanted = rows.double() @ weight.double().t()
        magnitudes = rows.double().abs() @ weight.double().abs().t()
        bound = magnitudes * rows.shape[1] * 2.0**-24 + wanted.abs() * torch.finfo(rows.dtype).eps + 1e-30
        assert result.dtype is rows.dtype
        assert result.is_contiguous()
        assert result.shape == wanted.shape
        assert ((result.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("instruction_set", cpp_build.usable_instruction_sets())
@settings(max_examples=60)
@given(
    count=st.integers(1, 9) | st.integers(1, products.MAX_ROWS),
    width=st.integers(1, 300)
    | st.integers(2000, 4200)
    | st.integers(1, 12).map(lambda n: 32 * n),  # tiles are of 32
    outs=st.lists(st.integers(1, 90), min_size=1, max_size=products.MAX_WEIGHTS),
    dtype=st.sampled_from(products.DTYPES),
    int8=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_float64(
    instruction_set: str, count: int, width: int, outs: list[int], dtype: torch.dtype, int8: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator).to(dtype)
    weights = [torch.randn(out, width, generator=generator).to(dtype) for out in outs]
    if int8:
        weights = [
            torch.randint(-128, 128, weight.shape, generator=generator).to(torch.int8) for weight in weights
        ]
    check(rows, weights, multiply_in(instruction_set, rows, weights))


@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize("count", [*range(1, 9), 15, 16, 17, 25, products.MAX_ROWS])
@pytest.mark.parametrize("width", [1000, 4100])
def test_large_weights_are_shared_out_among_threads(width: int, count: int, dtype: torch.dtype) -> None:
    rows = torch.randn(count, width).to(dtype)
    weights = [torch.randn(out, width).to(dtype) for out in (700, 3, 1100)]
    results = []
    for threads in (1, 2, 5):
        with num_threads(threads):
            results.append(multiply(rows, weights))
    check(rows, weights, results[0])
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize("count", [1, 2, products.MAX_ROWS])
def test_int8_weights_in_an_operator(count: int, dtype: torch.dtype) -> None:
    rows = torch.randn(count, 40).to(dtype)
    weights = [torch.randint(-128, 128, (n, 40)).to(torch.int8) for n in (7, 64)]
    check(rows, weights, multiply(rows, weights))
    check(rows, weights, products.by_blas(rows, weights))
    mixed = [weights[0], rows.new_ones(3, 40)]
    for order in (mixed, mixed[::-1]):
        with pytest.raises(RuntimeError, match="all int8"):
            multiply(rows, order)


def test_operator_is_there_before_cpp_is_and_without_it(tmp_path: Path) -> None:
    program = """
import os, sys
import torch
from specache_fx.runtime import ops
from specache_fx.runtime.native import graph_ops, products

rows, weights = torch.randn(2, 40), [torch.randn(5, 40)]
multiply = torch.ops.specache.products
by_blas = multiply(rows, *weights)
assert torch.equal(by_blas, products.by_blas(rows, weights)[0])
usual = dict(os.environ)
os.environ |= {"CXX": "no-such-compiler", "XDG_CACHE_HOME": sys.argv[1]}
assert graph_ops.load.__wrapped__() is None
assert torch.equal(multiply(rows, *weights), by_blas)
os.environ.clear()
os.environ.update(usual)
assert graph_ops.load() is not None
torch.testing.assert_close(multiply(rows, *weights), by_blas)
"""
    python("-c", program, str(tmp_path))


@pytest.mark.parametrize(
    ("rows", "weight", "message"),
    [
        (torch.ones(2, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64), "neither float32"),
        (torch.ones(4), torch.ones(3, 4), r"\[\.\.\., in\]"),
        (torch.ones(2, 0), torch.ones(3, 0), r"\[\.\.\., in\]"),
        (torch.ones(2, 4), torch.ones(3, 5), r"\[out, in\]"),
        (torch.ones(2, 4), torch.ones(4, 3).t(), "contiguous"),
        (torch.ones(2, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.int8), "neither float32"),
        (torch.ones(2, 4), torch.ones(3, 4, dtype=torch.bfloat16), "dtype of the rows"),
        (torch.ones(33, 4), torch.ones(3, 4, dtype=torch.int8), "int8 take 1 to 32 rows, not 33"),
        (torch.ones(0, 4), torch.ones(3, 4, dtype=torch.int8), "int8 take 1 to 32 rows, not 0"),
    ],
)
def test_what_cpp_does_not_multiply_is_refused(rows: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        multiply(rows, [weight])


@pytest.mark.parametrize("instruction_set", cpp_build.usable_instruction_sets())
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_nothing_is_read_or_written_beside_operands_and_results(
    instruction_set: str, dtype: torch.dtype
) -> None:
    for num_rows, out, width in itertools.product(
        (1, 5, 16, 17, 32), (1, 15, 16, 17, 31, 33, 70), (32, 96, 100)
    ):
        around = torch.full((width + out * width + width,), torch.nan, dtype=dtype)
        weight = around[width:-width].view(out, width).normal_()
        rows = torch.randn(num_rows, width).to(dtype)
        kept = torch.full((num_rows * out + 128,), 7.0, dtype=dtype)
        result = kept[64:-64].view(num_rows, out)
        check(rows, [weight], multiply_in(instruction_set, rows, [weight], [result]))
        assert (kept[:64] == 7).all() and (kept[-64:] == 7).all()


def test_tiles_multiply_where_processor_and_system_have_them() -> None:
    ask_for, tile_data = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    for name in cpp_build.usable_instruction_sets():
        has = name == "avx512_bf16" and {"amx_tile", "amx_bf16"} <= cpp_build.cpu_flags()
        if has:
            has = ctypes.CDLL(None).syscall(158, ask_for, tile_data) == 0  # arch_prctl
        assert has_tiles(name) == has


@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize("shape", [(0,), (33,), (2, 5), (2, 1, 3), (4, 20), (2, 0)])
def test_rows_in_more_dimensions_and_more_than_a_few_are_multiplied_too(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows, weights = torch.randn(*shape, 24).to(dtype), [torch.randn(out, 24).to(dtype) for out in (5, 40)]
    got = multiply(rows, weights)
    assert [result.shape for result in got] == [(*shape, 5), (*shape, 40)]
    check(rows.flatten(0, -2), weights, [result.flatten(0, -2) for result in got])
    check(rows.flatten(0, -2), weights, [part.flatten(0, -2) for part in products.by_blas(rows, weights)])


@pytest.mark.parametrize("count", range(1, products.MAX_WEIGHTS + 1))
def test_any_number_of_weights_up_to_the_most(count: int) -> None:
    rows, weights = torch.randn(2, 24), [torch.randn(out, 24) for out in range(1, count + 1)]
    check(rows, weights, multiply(rows, weights))


def test_infinities_and_nan_stay_what_they_are() -> None:
    rows = torch.tensor([[1.0, 1.0], [torch.inf, 1.0], [torch.nan, 1.0], [3e38, 3e38]])
    weight = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    for dtype in products.DTYPES:
        (got,) = multiply(rows.to(dtype), [weight.to(dtype)])
        wanted = rows.to(dtype).float() @ weight.t()
        torch.testing.assert_close(got, wanted.to(dtype), equal_nan=True)


def test_rows_that_do_not_lie_side_by_side_are_read_as_they_are() -> None:
    rows, weight = torch.randn(64, 2).t(), torch.randn(5, 64)
    check(rows, [weight], multiply(rows, [weight]))


def test_threads_multiply_at_the_same_time() -> None:
    rows, weights = torch.randn(2, 256), [torch.randn(512, 256)]
    wanted = multiply(rows, weights)[0]

    def repeat() -> None:
        for _ in range(50):
            assert torch.equal(multiply(rows, weights)[0], wanted)

    at_once([repeat] * 4)
