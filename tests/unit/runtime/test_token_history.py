"""The n-gram that a speculative token is taken from after a miss."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.oracle import following

from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.session.token_history import TokenHistory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["C++", "torch"], scope="module")
def by(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(graph_ops, "load", lambda: None)
        else:
            assert graph_ops.load() is not None
        yield


def history_of(*parts: list[list[int]]) -> TokenHistory:
    history, kv_len = TokenHistory(CPU), 0
    for part in parts:
        tokens = torch.tensor(part)
        history.append(tokens, kv_len)
        kv_len += tokens.shape[1]
    return history


def guesses(history: TokenHistory) -> list[int | None]:
    tokens, found = history.following()
    return [token if there else None for token, there in zip(tokens.tolist(), found.tolist(), strict=True)]


@given(
    rows=st.integers(1, 3).flatmap(
        lambda batch: st.lists(
            st.lists(st.integers(0, 2), min_size=batch, max_size=batch), min_size=1, max_size=40
        )
    ),
    cut=st.integers(0, 40),
)
def test_following_is_what_the_oracle_finds(rows: list[list[int]], cut: int) -> None:
    by_row = [list(row) for row in zip(*rows, strict=True)]
    parts = [[row[:cut] for row in by_row], [row[cut:] for row in by_row]]
    history = history_of(*[part for part in parts if part[0]])
    assert guesses(history) == [following(row) for row in by_row]


@pytest.mark.parametrize("tokens", [[5], [5, 6]])
def test_following_has_nothing_where_too_little_came_before(tokens: list[int]) -> None:
    assert guesses(history_of([tokens])) == [None]


def test_unknown_tokens_match_nothing() -> None:
    history = TokenHistory(CPU)
    history.append(torch.tensor([[7, 8]]), 6)  # six tokens that were taken over
    assert guesses(history) == [None]
    history.append(torch.tensor([[9, 7, 8]]), 8)
    assert guesses(history) == [9]
    history.append(torch.tensor([[8]]), 12)  # behind an unknown token that follows an 8
    assert guesses(history) == [9]
    apart = TokenHistory(CPU)
    apart.append(torch.tensor([[5]]), 0)
    apart.append(torch.tensor([[5]]), 2)
    assert guesses(apart) == [None]


def test_an_unknown_token_lengthens_no_match() -> None:
    history = TokenHistory(CPU)
    history.append(torch.tensor([[9]]), 0)
    history.append(torch.tensor([[7, 3, 8, 7, 4]]), 2)  # an unknown one, then 7
    history.append(torch.tensor([[7]]), 8)  # an unknown one, then 7 again
    assert guesses(history) == [4]  # what followed the last 7, not the first


def test_tokens_that_were_cut_off_are_unknown_where_nothing_replaces_them() -> None:
    history = history_of([[1, 2, 3, 4]])
    history.crop(1)
    history.append(torch.tensor([[1]]), 3)  # after two that nobody told
    assert guesses(history) == [None]


def test_crop_and_append_again_replace_tokens() -> None:
    history = history_of([[1, 2, 3, 1, 2]])
    assert guesses(history) == [3]
    history.crop(3)
    history.append(torch.tensor([[4, 2, 3]]), 3)
    assert guesses(history) == [4]
    history.append(torch.tensor([[1]]), 5)  # over the last one, as a step that is repeated does
    assert guesses(history) == [2]


def test_rows_are_put_in_their_order() -> None:
    history = history_of([[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [7, 8, 9, 7, 8]])
    history.reorder(torch.tensor([1, 1, 0]))
    assert guesses(history) == [6, 6, 3]
