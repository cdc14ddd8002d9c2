"""Triton's selection against `select_topk`: the same positions in the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.triton_mode import DEVICE, INSTALLED, needs_triton

from specache_fx.runtime.select import select_topk, topk_overlap

if INSTALLED:
    from specache_fx.runtime.select import triton_topk

pytestmark = [needs_triton, pytest.mark.gpu]
# Few different values, so that most rows have ties; the padding mark; the neighbours of zero.
LEVELS = torch.tensor([-1.0, -0.0, 0.0, 1e-45, 1e-38, 0.25, 0.5, 0.5000001, 1.0])


@settings(max_examples=6, deadline=None)
@given(tokens=st.integers(0, 80), top_k=st.integers(1, 8), ties=st.booleans(), seed=st.integers(0, 999))
@example(tokens=0, top_k=2, ties=True, seed=0)
@example(tokens=3, top_k=8, ties=True, seed=1)
@example(tokens=80, top_k=8, ties=True, seed=2)
def test_selection_equals_the_reference_with_ties(tokens, top_k, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(1, 2, tokens + 3, generator=generator)
    if ties:
        scores = LEVELS[(scores * len(LEVELS)).long()]
    scores = scores[..., :tokens]  # as a step hands them over: a part of longer rows
    wanted = select_topk(scores, top_k)
    chosen = triton_topk.select_topk(scores.to(DEVICE), top_k, block=32)
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen.cpu(), wanted)


@settings(max_examples=8, deadline=None)
@given(tokens=st.integers(1, 80), top_k=st.integers(1, 8), ties=st.booleans(), seed=st.integers(0, 999))
@example(tokens=80, top_k=8, ties=True, seed=2)
@example(tokens=3, top_k=8, ties=True, seed=3)  # fewer than are wanted
def test_overlap_equals_the_reference_with_ties(tokens, top_k, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 3, tokens + 3, generator=generator)
    if ties:
        scores = LEVELS[(scores * len(LEVELS)).long()]
    scores = scores[..., :tokens]
    order = torch.rand(2, 3, tokens, generator=generator).argsort(-1)[..., : max(tokens // 2, 1)]
    positions = torch.full((2, 3, 70), -1, dtype=torch.int32)
    positions[..., : 2 * order.shape[2] : 2] = order.to(torch.int32)[..., :35]
    wanted = torch.stack([each.double() for each in topk_overlap(scores, top_k, positions)], 1)
    before = torch.arange(8, dtype=torch.float64).view(2, 4)
    counts = before.clone().to(DEVICE)
    triton_topk.count_overlap(scores.to(DEVICE), top_k, positions.to(DEVICE), counts, block=32)
    torch.testing.assert_close(counts.cpu(), before + wanted, rtol=1e-12, atol=0)
