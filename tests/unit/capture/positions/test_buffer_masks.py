"""Masks over a whole buffer: what they show behind the tokens, and which of them can be cut to these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import graphs
from torch import Tensor
from torch.fx import Node

from specache_fx.capture.graph.graph_edit import fake_mode_of
from specache_fx.capture.graph.graph_utils import placeholders, shape_of, value_of
from specache_fx.capture.positions.buffer_masks import cut_to, is_narrow, shows_behind

LENGTH, KV_LEN = 32, 20


@pytest.mark.parametrize("hidden", [False, -1e4, torch.finfo(torch.float32).min])
def test_a_mask_shows_what_it_does_not_hide(hidden: float) -> None:
    mask = torch.full((2, 1, 1, LENGTH), hidden)
    mask = mask.bool() if hidden is False else mask
    mask[..., :KV_LEN] = hidden is False
    assert not shows_behind(mask, torch.tensor(KV_LEN))
    mask[1, 0, 0, KV_LEN] = True if hidden is False else -1.0
    assert shows_behind(mask, torch.tensor(KV_LEN))
    assert not shows_behind(mask, torch.tensor(KV_LEN + 1))


def traced(compute: Callable[[Tensor, Tensor], Tensor]) -> tuple[Node, list[Node]]:
    """The mask that a graph computes of a mask over keys and of positions, and the inputs."""
    keys, positions = torch.ones(2, LENGTH, dtype=torch.bool), torch.arange(3)
    (taken,) = graphs.capture(graphs.FunctionModule(compute), lambda model: model(keys, positions))
    graph = taken.copy().graph
    (mask,) = graph.output_node().args[0]  # type: ignore[misc]
    return mask, placeholders(graph)


def added(keys: Tensor, positions: Tensor) -> Tensor:
    return torch.where(keys[:, None, None, :], 0.0, -1e9).expand(-1, -1, 3, -1) * (positions[:, None] >= 0)


def test_a_mask_of_its_columns_one_by_one_is_cut() -> None:
    mask, (keys, _) = traced(added)
    mode = fake_mode_of([value_of(mask)])
    assert mode is not None
    assert cut_to(mask, KV_LEN, mode, lambda node: node.op == "output") is keys
    assert shape_of(keys) == (2, KV_LEN) and shape_of(mask) == (2, 1, 3, KV_LEN)


@pytest.mark.parametrize(
    "compute",
    [
        lambda keys, positions: (
            keys.cumsum(1)[:, None, None, :] > positions[:, None]
        ),  # of more than its column
        lambda keys, positions: positions[:, None] >= torch.arange(LENGTH) + 0 * positions[:1],  # no input
        lambda keys, positions: added(keys, positions) + torch.ones(LENGTH),  # a number of columns of its own
    ],
    ids=["sum", "no-input", "length"],
)
def test_another_mask_stays_as_it_is(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    mask, inputs = traced(compute)
    shapes = [shape_of(node) for node in (*inputs, mask)]
    mode = fake_mode_of([value_of(mask)])
    assert mode is not None
    assert cut_to(mask, KV_LEN, mode, lambda node: node.op == "output") is None
    assert [shape_of(node) for node in (*inputs, mask)] == shapes


def test_a_mask_that_something_else_reads_stays_as_it_is() -> None:
    mask, (keys, _) = traced(added)
    mode = fake_mode_of([value_of(mask)])
    assert mode is not None
    assert cut_to(mask, KV_LEN, mode, lambda node: False) is None
    assert shape_of(keys) == (2, LENGTH)


def test_a_narrow_mask_has_one_column_for_all_keys() -> None:
    narrow, _ = traced(lambda keys, positions: positions[:, None] > 0)
    assert is_narrow(narrow) and not is_narrow(traced(added)[0])
