"""`select_topk` against plain Python: ties, padding, fewer valid positions than asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specache_fx.runtime.select import SELECTORS, count_topk, select_topk

# Few different values, so that most rows have ties; the padding mark; the neighbours of zero.
SCORES = st.sampled_from([-1.0, -0.0, 0.0, 1e-45, 1e-38, 0.25, 0.5, 0.5000001, 1.0])


def best(row: list[float], top_k: int) -> list[int]:
    valid = [position for position, score in enumerate(row) if score >= 0]
    chosen = sorted(valid, key=lambda position: (-row[position], position))[:top_k]
    return chosen + [-1] * (top_k - len(chosen))


@pytest.mark.parametrize("name", SELECTORS)
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
def test_selection_equals_a_sort_by_score_and_position(name, rows, top_k):
    scores = torch.tensor(rows, dtype=torch.float32).reshape(2, 3, -1)
    chosen = SELECTORS[name](scores, top_k)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == [[best(row, top_k) for row in rows[:3]], [best(row, top_k) for row in rows[3:]]]


@pytest.mark.parametrize("top_k", [1, 64, 4095, 4096, 5000])
def test_selection_is_exact_on_long_rows_with_ties(top_k):
    scores = torch.rand(1, 2, 4096, generator=torch.Generator().manual_seed(0)).mul(50).round().div(50)
    scores[0, 1, ::3] = -1
    assert select_topk(scores, top_k)[0].tolist() == [best(row, top_k) for row in scores[0].tolist()]


def test_selection_takes_scores_of_any_layout_and_leaves_them_alone():
    scores = torch.rand(5, 2, 3).permute(1, 2, 0)
    before = scores.clone()
    assert torch.equal(select_topk(scores, 2), select_topk(scores.contiguous(), 2))
    assert torch.equal(scores, before)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), n=st.integers(1, 12), top_k=st.integers(1, 14))
def test_count_equals_what_the_selection_holds(data, n, top_k):
    rows = data.draw(st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=6, max_size=6))
    some = st.lists(st.integers(0, n - 1), max_size=n, unique=True)
    positions = [(found + [-1] * (n - len(found)))[:n] for found in data.draw(st.tuples(*[some] * 6))]
    hits, needed = count_topk(
        torch.tensor(rows, dtype=torch.float32).reshape(2, 3, n),
        top_k,
        torch.tensor(positions, dtype=torch.int32).reshape(2, 3, n),
    )
    wanted = [set(best(row, top_k)) - {-1} for row in rows]
    assert int(needed) == sum(map(len, wanted))
    assert int(hits) == sum(len(w & set(found)) for w, found in zip(wanted, positions, strict=True))


def test_count_is_exact_on_long_rows_with_ties():
    scores = torch.rand(1, 2, 4096, generator=torch.Generator().manual_seed(0)).mul(50).round().div(50)
    positions = torch.randperm(4096, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    positions = positions[:512].reshape(1, 2, 256)
    wanted = [set(best(row, 64)) for row in scores[0].tolist()]
    expected = sum(len(w & set(row)) for w, row in zip(wanted, positions[0].tolist(), strict=True))
    hits, needed = count_topk(scores, 64, positions)
    assert (int(hits), int(needed)) == (expected, 128)
