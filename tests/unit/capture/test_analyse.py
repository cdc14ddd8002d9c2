"""The attentions of a graph, and the tensors that could be caches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support import graphs
from support.captured import captured
from torch import Tensor

from specache_fx.capture.analyse import attention_cores, kv_inputs, may_have_cache
from specache_fx.capture.program import Phase

Q, K, PAST = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8), torch.randn(2, 4, 5, 8)


def test_inputs_of_numbers_may_be_caches_and_those_of_sizes_may_not() -> None:
    gm = graphs.traced(
        lambda q, k, x, n: (q + k.new_zeros(k.shape), x * 2, n + 1), Q, PAST, torch.ones(2, 3), K.long()
    )
    assert kv_inputs(gm) == [0] and may_have_cache(gm)
    assert not may_have_cache(graphs.traced(lambda x: x * 2, torch.ones(2, 3)))


def test_a_result_of_four_dimensions_may_be_a_cache() -> None:
    assert may_have_cache(graphs.traced(lambda x: x[:, None, None] * 2, torch.ones(2, 3)))


def test_both_spellings_of_attention_have_one_form() -> None:
    def function(q: Tensor, k: Tensor, past: Tensor) -> Any:
        keys = torch.cat([past, k], 2)
        first = F.scaled_dot_product_attention(q, keys, keys, scale=0.5)
        return first, (first @ keys.mT * 0.5).softmax(-1) @ keys, keys

    cores, unknown = attention_cores(graphs.traced(function, Q, K, PAST))
    assert (
        unknown == {}
        and [(core.mask, core.sinks, core.softcap) for core in cores] == [(None, None, None)] * 2
    )
    assert all(abs(core.scale - 0.5) < 1e-6 for core in cores)


def test_a_softmax_of_another_form_has_its_reason() -> None:
    def function(q: Tensor, k: Tensor, past: Tensor) -> Any:
        keys = torch.cat([past, k], 2)
        return ((q @ keys.mT) ** 2).softmax(-1) @ keys, keys

    cores, unknown = attention_cores(graphs.traced(function, Q, K, PAST))
    ((node, reason),) = unknown.items()
    assert cores == [] and "softmax" in str(node.target) and "(pow, " in reason


def test_phases_follow_past_and_number_of_tokens() -> None:
    for phase, taken in captured("tiny").items():
        program = graphs.matched(taken)
        assert program.phase is phase
        assert (program.decoding is not None) == (phase is Phase.DECODE)
        assert bool(program.past_inputs) == (phase is not Phase.PREFILL)
