"""Rows of attention masks, split into padding and bias."""

from __future__ import annotations

import pytest
import torch

from specache_fx.errors import UnsupportedGraphError
from specache_fx.runtime.layers.masks import by_lane, hides, split_row

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_least_number_and_infinity_hide(dtype: torch.dtype) -> None:
    row = torch.tensor([0.0, torch.finfo(dtype).min, -torch.inf, 0.0], dtype=dtype)
    real, bias = split_row(row, batch=2)
    assert bias is None
    assert real is not None
    assert real.tolist() == [[True, False, False, True]] * 2


def test_a_part_of_the_least_number_hides_where_there_is_room() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert bool(hides(torch.tensor(torch.finfo(dtype).min / 32, dtype=dtype)))
    # An ALiBi of slope 1/2 over 100,000 tokens is a bias.
    assert not bool(hides(torch.tensor(-50_000.0)))


def test_a_row_without_padding_and_bias_is_nothing() -> None:
    assert split_row(torch.zeros(1, 1, 4), batch=3) == (None, None)
    assert split_row(torch.ones(4, dtype=torch.bool), batch=3) == (None, None)


def test_a_bias_per_head_keeps_its_heads_and_is_0_at_hidden_keys() -> None:
    added = torch.arange(12.0).reshape(1, 3, 4).expand(2, 3, 4).clone()
    added[0, :, :2] = -torch.inf
    real, bias = split_row(added, batch=2)
    assert real is not None and bias is not None
    assert real.tolist() == [[False, False, True, True], [True] * 4]
    assert bias.shape == (2, 3, 4)
    assert torch.equal(bias[0, :, :2], torch.zeros(3, 2))
    assert torch.equal(bias[1], added[1])


def test_two_dimensions_are_heads_and_keys() -> None:
    _, bias = split_row(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), batch=5)
    assert bias is not None and bias.shape == (1, 2, 2)


def test_keys_that_some_heads_see_are_refused() -> None:
    row = torch.tensor([[True, True], [False, True]])
    with pytest.raises(UnsupportedGraphError, match="some heads only"):
        split_row(row, batch=1)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_bias_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(UnsupportedGraphError, match="neither finite nor -inf"):
        split_row(torch.tensor([0.0, value]), batch=1)


@pytest.mark.parametrize(
    ("rows", "independent", "expected"),
    [
        ([[0, 1, 2, 3], [10, 11, 12, 13, 14]], False, [[0, 1, 2, 3, 0], [10, 11, 12, 13, 14]]),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], True, [[0, 1, 2, 3, 0], [0, 1, 2, 0, 3]]),
        ([[1, 2, 3, 4], [11, 12, 13, 14]], False, [[1, 2, 3, 4, 0], [0, 11, 12, 13, 14]]),
    ],
    ids=["stored keys and own ones up to theirs", "the same token", "a full window has lost the oldest pair"],
)
def test_lanes_see_what_is_theirs(
    rows: list[list[int]], independent: bool, expected: list[list[int]]
) -> None:
    bias = by_lane([torch.tensor([[row]]).float() for row in rows], 3, independent=independent)
    assert bias is not None
    assert bias[:, 0, 0].tolist() == expected


def test_lanes_without_a_bias_have_none() -> None:
    assert by_lane([None, None], 3, independent=False) is None
