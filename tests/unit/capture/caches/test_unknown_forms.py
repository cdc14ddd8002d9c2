"""Caches that no known attention reads: what is said of them."""

from __future__ import annotations

from typing import Any

import torch
from support import graphs
from torch import Tensor

from specache_fx.capture.analyse import analyse
from specache_fx.capture.program import Refusal
from specache_fx.config import SpecacheConfig

Q, K, PAST = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8), torch.randn(2, 4, 5, 8)


def refusals(function: Any, *tensors: Tensor) -> tuple[Refusal, ...]:
    inputs = tensors or (Q, K, K.clone(), PAST, PAST.clone())
    return analyse(graphs.traced(function, *inputs), SpecacheConfig()).refusals


def appended(k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([pk, k], 2), torch.cat([pv, v], 2)


def test_an_append_that_nothing_reads_suspects_a_graph_break() -> None:
    found = refusals(lambda q, k, v, pk, pv: (q * 2, *appended(k, v, pk, pv)))
    assert len(found) == 2
    for each in found:
        assert "nothing in this graph reads its cache (a graph break" in each.reason
        assert "graph_breaks" in each.remedy


def test_a_cache_that_no_attention_reads_is_named_by_what_does() -> None:
    def linear(q: Tensor, *new: Tensor) -> Any:
        keys, values = appended(*new)
        return q @ (keys.mT @ values), keys, values

    (refusal,) = refusals(linear)
    assert refusal.reason.startswith("no attention that specache knows reads this cache")
    assert "keys.mT @ values" in refusal.source and "scaled_dot_product_attention there" in refusal.remedy


def test_several_layers_in_one_tensor_are_one_message() -> None:
    def stacked(q: Tensor, k: Tensor, past: Tensor) -> Any:
        cache = torch.cat([past, torch.stack([k, k])], 3)
        scores = (q @ (cache[0] ** 2).mT).softmax(-1)
        return scores @ cache[1].exp(), cache

    (refusal,) = refusals(stacked, Q, K, torch.randn(2, 2, 4, 5, 8))
    assert "keys and values, or several layers, in one tensor, and `" in refusal.reason
    assert "(_softmax, " in refusal.reason


def test_a_branch_of_another_graph_is_where_nobody_looks() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
        keys, values = torch.cat([pk, k], 1), torch.cat([pv, v], 1)
        return (q @ keys.mT).softmax(-1) @ values, keys, values

    def other(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
        return layer(q * 2, k, v, pk, pv)

    found = refusals(
        lambda *given: torch.cond(given[0].sum() > 0, layer, other, given),
        *(torch.randn(2, n, 8) for n in (1, 1, 1, 5, 5)),
    )
    assert found and all("runs inside `cond`, where specache does not look" in each.reason for each in found)
