"""`flatten` and `unflatten`: subclasses as the tensors in them, and made of these again."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from specache_fx.capture.graph.subclasses import flatten, unflatten


def test_subclasses_are_taken_apart_and_others_stay() -> None:
    a, b, plain, weight = torch.ones(2), torch.zeros(2), torch.arange(3), torch.nn.Parameter(torch.ones(1))
    nested = TwoTensor(TwoTensor(a, b), TwoTensor(b, a))
    flat = flatten([plain, nested, 5, weight])
    assert [id(value) for value in flat] == [id(value) for value in (plain, a, b, b, a, 5, weight)]


def test_traces_of_the_parts_make_the_subclass_again() -> None:
    values = [7, TwoTensor(torch.ones(2), torch.zeros(2)), torch.arange(3)]
    again = unflatten(values, [8, torch.full((2,), 2.0), torch.full((2,), 3.0), torch.arange(1, 4)])
    assert again[0] == 8 and again[2].tolist() == [1, 2, 3]
    assert type(again[1]) is TwoTensor
    assert again[1].a.tolist() == [2, 2] and again[1].b.tolist() == [3, 3]
