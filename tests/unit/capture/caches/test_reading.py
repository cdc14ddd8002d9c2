"""The cached tensors behind an attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor

from specache_fx.capture.analyse import attention_cores
from specache_fx.capture.caches.reading import Reading, readings_of
from specache_fx.capture.graph.left_alone import LeaveAlone

Q, K, PAST = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 5, 8)


def read(function: Any) -> tuple[Reading | LeaveAlone, list[Any]]:
    """The reading of the only attention, and what is returned behind its output."""

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
        return function(q, torch.cat([pk, k], 2), torch.cat([pv, v], 2))

    gm = graphs.traced(step, Q, K, K.clone(), PAST, PAST.clone())
    outputs = gm.graph.output_node().all_input_nodes
    (reading,) = readings_of(gm, attention_cores(gm)[0], set(outputs)).values()
    return reading, outputs[1:]


def sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def test_what_is_cached_is_read_as_it_is() -> None:
    reading, cached = read(lambda q, k, v: (sdpa(q, k, v), k, v))
    assert isinstance(reading, Reading) and not reading.is_expanded
    assert [reading.key_cache, reading.value_cache] == cached


def test_heads_are_repeated_on_the_way() -> None:
    reading, cached = read(
        lambda q, k, v: (sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)), k, v)
    )
    assert isinstance(reading, Reading) and not reading.is_expanded
    assert [reading.key_cache, reading.value_cache] == cached
    assert any("expand" in str(node.target) for node in reading.inside)


def test_values_that_are_computed_from_one_tensor_have_it_as_theirs() -> None:
    reading, (first, second) = read(lambda q, k, v: (sdpa(q, k + v, k * 2), k, v))
    assert isinstance(reading, Reading) and reading.is_expanded
    assert (reading.key_cache, reading.value_cache) == (second, first)


def test_what_is_not_returned_is_no_cache() -> None:
    reading, _ = read(sdpa)
    assert isinstance(reading, LeaveAlone) and "what the model returns as its cache" in reading.reason


def test_a_third_tensor_is_one_too_many() -> None:
    reading, _ = read(lambda q, k, v: (sdpa(q, k * 2, v), k, v, k + v))
    assert isinstance(reading, Reading)
    reading, _ = read(lambda q, k, v: (sdpa(q, (third := k + v) * k, v * 2), k, v, third))
    assert isinstance(reading, LeaveAlone) and "which is not a pair of tensors" in reading.reason
