"""Every form of a cache: numbers and handles come back from it, and a handle is told by its elements and strides."""

from __future__ import annotations

import pytest
import torch

from specache_fx.runtime.handles import handle as handles
from specache_fx.runtime.handles.handle_form import (
    FORMS,
    HEADS_FIRST,
    dims_of,
    in_form,
    is_laid_out,
    joined,
    num_sides,
    sides_of,
)

BATCH, HEADS, TOKENS, DIM = 3, 2, 7, 8


@pytest.mark.parametrize("form", FORMS)
def test_numbers_come_back(form: str) -> None:
    sides = [torch.randn(BATCH, HEADS, TOKENS, DIM) for _ in range(num_sides(form))]
    whole = joined(sides, form)
    assert whole.dim() == len(dims_of(form))
    for side, back in zip(sides, sides_of(whole.contiguous(), form, HEADS, is_handle=False), strict=True):
        assert torch.equal(side, back)
    assert not is_laid_out(whole.contiguous())


@pytest.mark.parametrize("form", [form for form in FORMS if form != HEADS_FIRST])
def test_a_handle_and_its_copy_come_back(form: str) -> None:
    count = num_sides(form)
    issued = handles.issue(5, [(HEADS, DIM)] * count, BATCH, TOKENS, torch.float32, torch.device("cpu"))
    moved = in_form(issued, form)
    assert is_laid_out(moved)
    for whole in (moved, moved.clone(memory_format=torch.contiguous_format)):
        code = handles.first_code(whole)
        assert code is not None and (code.session, code.slot) == (5, 0) and handles.is_poisoned(whole)
        for side, back in zip(issued, sides_of(whole, form, HEADS, is_handle=True), strict=True):
            torch.testing.assert_close(back, side, rtol=0, atol=0, equal_nan=True)
            assert handles.decode(back) == handles.decode(side)
