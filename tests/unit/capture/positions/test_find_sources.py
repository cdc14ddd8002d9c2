"""The inputs of a decode graph that say where it is in the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from support.captured import captured
from torch import Tensor

from specache_fx.capture.analyse import analyse
from specache_fx.capture.program import Phase, Program
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.graph.sources import Sources


def step_of(model: str) -> tuple[Program, Sources]:
    program = graphs.matched(captured(model)[Phase.DECODE])
    assert program.decoding is not None
    return program, program.decoding.sources


@pytest.mark.parametrize("model", ["tiny", "llama", "tokens first"])
def test_a_mask_over_keys_a_past_and_a_length_are_told_apart(model: str) -> None:
    program, sources = step_of(model)
    assert sources.caches == {*program.past_inputs} and len(sources.masks) == 1
    assert program.token not in sources.counts | sources.masks
    assert sources.counts and sources.knows_next and not sources.fixed_length


def test_a_mask_gets_a_column_and_a_length_one_more() -> None:
    taken = captured("llama")[Phase.DECODE]
    _, sources = step_of("llama")
    (mask,) = sources.masks
    later = sources.ahead(taken.inputs, range(len(taken.inputs)), 2)
    assert later[mask].shape[-1] == taken.inputs[mask].shape[-1] + 2 and bool(
        (later[mask][..., -2:] == 1).all()
    )
    for place in sources.counts:
        assert torch.equal(torch.as_tensor(later[place]), torch.as_tensor(taken.inputs[place]) + 2)


def test_a_length_that_is_a_constant_says_no_next_one() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
        keys, values = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values

    given = [torch.randn(2, 4, count, 8) for count in (1, 1, 1, 5, 5)]
    decoding = analyse(graphs.traced(step, *given), SpecacheConfig()).decoding
    assert decoding is not None
    assert decoding.sources.fixed_length and not decoding.sources.knows_next
