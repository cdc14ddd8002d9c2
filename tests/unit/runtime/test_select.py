"""`select_topk` against plain Python: ties, padding, fewer valid positions than asked for."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.threads import num_threads

from specache_fx.config import Aggregation
from specache_fx.runtime.native import cpp_build, graph_ops
from specache_fx.runtime.select import AGGREGATIONS, count_overlap, select_topk, topk_overlap
from specache_fx.runtime.select.topk import sorted_topk

# Few different values, so that most rows have ties; the padding mark; the neighbours of zero.
SCORES = st.sampled_from([-1.0, -0.0, 0.0, 1e-45, 1e-38, 0.25, 0.5, 0.5000001, 1.0])


def best(row: list[float], top_k: int) -> list[int]:
    valid = [position for position, score in enumerate(row) if score >= 0]
    chosen = sorted(valid, key=lambda position: (-row[position], position))[:top_k]
    return chosen + [-1] * (top_k - len(chosen))


@pytest.mark.parametrize("select", [select_topk, sorted_topk])
@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 12).flatmap(
        lambda n: st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=6, max_size=6)
    ),
    top_k=st.integers(1, 14),
)
@example(rows=[[0.5] * 12] * 6, top_k=3)
@example(rows=[[-1.0] * 4] * 6, top_k=3)
@example(rows=[[]] * 6, top_k=2)
@example(rows=[[-0.0, 0.0]] * 6, top_k=1)
def test_selection_equals_a_sort_by_score_and_position(select, rows, top_k):
    scores = torch.tensor(rows, dtype=torch.float32).reshape(2, 3, -1)
    chosen = select(scores, top_k)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == [[best(row, top_k) for row in rows[:3]], [best(row, top_k) for row in rows[3:]]]


@pytest.mark.parametrize("select", [select_topk, sorted_topk])
@pytest.mark.parametrize("top_k", [1, 64, 128, 4095, 4096, 5000])
def test_selection_is_exact_on_long_rows_with_ties(top_k, select):
    scores = torch.rand(1, 2, 4096, generator=torch.Generator().manual_seed(0)).mul(50).round().div(50)
    scores[0, 1, ::3] = -1
    assert select(scores, top_k)[0].tolist() == [best(row, top_k) for row in scores[0].tolist()]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_are_shared_out_among_threads(threads):
    scores = torch.rand(2, 4, 8000, generator=torch.Generator().manual_seed(0))
    scores[0, 0] = 0.25  # all alike
    scores[0, 1] = -1
    scores[1, 0] = torch.linspace(0, 1, 8000)
    with num_threads(threads):
        chosen = select_topk(scores, 64)
    assert chosen.flatten(0, 1).tolist() == [best(row, 64) for row in scores.flatten(0, 1).tolist()]


@pytest.mark.skipif(cpp_build.find_compiler() is None, reason="no C++ compiler")
def test_selection_on_the_cpu_is_in_cpp_where_it_can_be_built():
    assert graph_ops.load() is not None


def test_selection_takes_scores_of_any_layout_and_leaves_them_alone():
    scores, turned = torch.rand(2, 3, 9), torch.rand(5, 2, 3).permute(1, 2, 0)
    for part in (scores[..., :5], scores[..., 4:], scores[:1], scores[:, 1:], turned):
        before = part.clone()
        assert torch.equal(select_topk(part, 2), sorted_topk(part.contiguous(), 2))
        assert torch.equal(part, before)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), n=st.integers(1, 12), top_k=st.integers(1, 14))
def test_overlap_equals_what_the_selection_holds(data, n, top_k):
    rows = data.draw(st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=6, max_size=6))
    some = st.lists(st.integers(0, n - 1), max_size=n, unique=True)
    positions = [(found + [-1] * (n - len(found)))[:n] for found in data.draw(st.tuples(*[some] * 6))]
    check_overlap(rows, top_k, positions)


def test_overlap_is_exact_on_long_rows_with_ties():
    scores = torch.rand(6, 4096, generator=torch.Generator().manual_seed(0)).mul(50).round().div(50)
    positions = torch.randperm(4096, generator=torch.Generator().manual_seed(1))
    check_overlap(scores.tolist(), 64, positions[:1536].reshape(6, 256).tolist())


def check_overlap(rows, top_k, positions):
    scores = torch.tensor(rows, dtype=torch.float32)  # as the kernels have them
    staged = torch.tensor(positions, dtype=torch.int32)
    overlap = topk_overlap(scores.reshape(2, 3, -1), top_k, staged.reshape(2, 3, -1))
    rows = scores.tolist()
    wanted = [set(best(row, top_k)) - {-1} for row in rows]
    needed = [len(chosen) for chosen in wanted]
    hits = [len(w & set(found)) for w, found in zip(wanted, positions, strict=True)]
    # Padding (below 0) has no mass.
    masses = [
        [sum(max(row[i], 0.0) for i in chosen if i >= 0) for row, chosen in zip(rows, sets, strict=True)]
        for sets in (positions, wanted)
    ]
    # Two batch rows of three kv heads each.
    expected = torch.tensor([hits, needed, *masses], dtype=torch.float64).reshape(4, 2, 3).sum(2)
    torch.testing.assert_close(torch.stack([each.double() for each in overlap]), expected, rtol=1e-12, atol=0)
    before = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    counts = before.clone()
    count_overlap(scores.reshape(2, 3, -1), top_k, staged.reshape(2, 3, -1), counts)
    torch.testing.assert_close(counts, before + expected.T, rtol=1e-12, atol=0)


def test_every_aggregation_is_an_option():
    assert get_args(Aggregation) == tuple(AGGREGATIONS)


def test_aggregations_of_padding_stay_below_zero():
    marks, probabilities = torch.tensor([-1.0, 0.25]), torch.tensor([-1.0, 0.5])
    found = {name: rule.of_attentions(marks, probabilities).tolist() for name, rule in AGGREGATIONS.items()}
    assert found == {"mean": [-2.0, 0.75], "max": [-1.0, 0.5]}
