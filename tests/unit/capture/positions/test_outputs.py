"""What becomes of each output of a graph, and which one has the logits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import graphs
from support.captured import captured
from torch import Tensor
from torch.fx import Node

from specache_fx.capture.positions.outputs import find_logits
from specache_fx.capture.program import Phase


def outputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Node]:
    """The outputs of a graph that computes tensors of these shapes, one behind the other."""

    def compute(x: Tensor) -> list[Tensor]:
        return [x.to(dtype).sum() + torch.zeros(shape, dtype=dtype) for shape in shapes]

    (taken,) = graphs.capture(graphs.FunctionModule(compute), lambda model: model(torch.ones(2)))
    return list(taken.copy().graph.output_node().args[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "place"),
    [
        (((2, 1, 8), (2, 1, 640), (2, 7)), 1),
        (((2, 640),), 0),
        (((2, 1, 640), (2, 1, 640)), 1),  # the last one computed
        (((2, 1, 640), (2, 1, 630)), 0),  # a number for every token, before one that lacks some
        (((2, 1, 610),), 0),  # of a table with 30 rows that are never predicted
        (((2, 1, 600),), None),
        (((2, 1, 641),), None),
        (((640,), (1, 2, 1, 640)), None),
    ],
)
def test_logits_have_a_number_for_every_token(shapes: tuple[tuple[int, ...], ...], place: int | None) -> None:
    assert find_logits(outputs(*shapes), 640) == place


def test_integers_and_a_graph_without_a_vocabulary_have_no_logits() -> None:
    assert find_logits(outputs((2, 1, 640), dtype=torch.int64), 640) is None
    assert find_logits(outputs((2, 1, 640)), None) is None
    assert find_logits([], 640) is None


def test_each_output_of_a_step_is_a_handle_or_computed() -> None:
    taken = captured("tiny")[Phase.DECODE]
    plan = graphs.matched(taken).outputs
    assert plan is not None
    assert sorted(plan.handles.values()) == [0, 1, 2, 3]  # keys and values of two layers
    count = len(taken.gm.graph.output_node().args[0])  # type: ignore[arg-type]
    assert sorted([*plan.handles, *plan.kept, *plan.lengths, *plan.constants]) == list(range(count))
    assert len(plan.kept) == 1


class Counted(torch.nn.Module):
    """A model that returns the number of its tokens, and a constant, beside its results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = graphs.tiny_decoder()

    def forward(self, ids: Tensor, past: object = None, attention_mask: Tensor | None = None) -> object:
        logits, pasts = self.inner(ids, past=past, attention_mask=attention_mask)
        return (logits, pasts[0][0].shape[2], "a word"), pasts


def test_a_length_is_computed_apart_and_a_constant_is_kept() -> None:
    taken = graphs.by_phase(graphs.capture(Counted(), partial(graphs.drive_tiny, padded=False)))[Phase.DECODE]
    plan = graphs.matched(taken).outputs
    assert plan is not None and plan.length_part is not None
    assert plan.length_part(taken.inputs) == (11,)
