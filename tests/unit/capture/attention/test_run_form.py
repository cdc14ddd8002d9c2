"""The parts of attention that is spelt out: its product, its scores, its heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import graphs
from torch import Tensor
from torch.fx import GraphModule, Node

from specache_fx.capture.attention.run_form import is_of_one_token, path_of, swapped_in, turned
from specache_fx.capture.graph.graph_utils import target_name
from specache_fx.capture.graph.left_alone import UnknownFormError

Q, K = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)


def softmax_of(gm: GraphModule) -> Node:
    (node,) = graphs.nodes_of(gm, torch.ops.aten._softmax.default)
    return node


def scores(function: Callable[..., Tensor]) -> Node:
    return softmax_of(graphs.traced(lambda q, k: function(q, k).softmax(-1), Q, K))


def test_a_path_leads_from_the_product_to_the_softmax() -> None:
    softmax = scores(lambda q, k: (q @ k.mT * 0.5).tanh() + torch.ones(5))
    path = path_of(softmax)
    assert target_name(path[0]) == "bmm" and path[-1] is softmax.args[0]
    assert [name for name in map(target_name, path) if name not in ("reshape", "bmm")] == [
        "mul",
        "tanh",
        "add",
    ]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k: q @ k.mT + q @ k.mT.sin(), "is another product in its scores"),
        (lambda q, k: q * 2, "is no product of queries and keys"),
    ],
    ids=["two", "none"],
)
def test_scores_are_of_one_product(function: Callable[..., Tensor], reason: str) -> None:
    with pytest.raises(UnknownFormError, match=reason):
        path_of(scores(function))


def test_scores_with_heads_behind_the_queries_are_swapped() -> None:
    softmax = scores(lambda q, k: (q @ k.mT).transpose(1, 2) * 2)
    assert softmax.args[0] in swapped_in(path_of(softmax))
    softmax = scores(lambda q, k: (q @ k.mT).transpose(1, 2).transpose(1, 2) * 2)
    assert swapped_in(path_of(softmax)) == set()


def test_an_append_of_one_token_is_a_step() -> None:
    for count, expected in ((1, True), (3, False)):
        gm = graphs.traced(lambda past, new: torch.cat([past, new], 2), K, K[:, :, :count])
        assert is_of_one_token(gm.graph) == expected


def test_heads_turn_and_turn_back() -> None:
    heads = torch.arange(6)
    assert turned(heads, 0, (2, 3)).tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(turned(turned(heads, 0, (2, 3)), 0, (3, 2)), heads)
