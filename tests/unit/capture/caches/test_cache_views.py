"""Keys and values between the model's form and heads first, and the attentions that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx import GraphModule

from specache_fx.capture.caches.cache_views import as_in_model, attentions_of, heads_first_of, read_sides
from specache_fx.capture.graph.graph_edit import finish
from specache_fx.capture.graph.graph_utils import placeholders, shape_of
from specache_fx.runtime.handles.handle_form import FORMS, joined, num_sides

SIDES = [torch.randn(2, 3, 5, 8) for _ in range(2)]


def empty(*tensors: Tensor) -> GraphModule:
    """A graph that returns its inputs, and may be edited."""
    return graphs.traced(lambda *given: [each * 1 for each in given], *tensors)


def returning(gm: GraphModule, outs: Any) -> Any:
    gm.graph.output_node().args = (tuple(outs),)
    return finish(gm)


@pytest.mark.parametrize("form", FORMS)
def test_sides_come_out_of_what_the_model_has_of_them(form: str) -> None:
    sides = SIDES[: num_sides(form)]
    whole = joined(sides, form)
    gm = empty(whole)
    (given,) = placeholders(gm.graph)
    with gm.graph.inserting_before(gm.graph.output_node()):
        found = [heads_first_of(gm.graph, given, form, 3, i, given) for i in range(len(sides))]
        again = as_in_model(gm.graph, found, form, given)
    assert [shape_of(node) for node in found] == [(2, 3, 5, 8)] * len(sides)
    *results, whole_again = returning(gm, [*found, again])(whole)
    assert all(map(torch.equal, results, sides)) and torch.equal(whole_again, whole)


def spelt_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (side.repeat_interleave(2, 1) for side in (k, v))
    return (q @ k.mT / 8).softmax(-1) @ v


def by_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1 / 8, enable_gqa=True)


@pytest.mark.parametrize("attend", [spelt_out, by_operator])
def test_an_attention_reads_other_sides(attend: Callable[..., Tensor]) -> None:
    q, (k, v) = torch.randn(2, 6, 1, 8), SIDES
    given = q, k, v, v.clone(), k.clone()
    gm = graphs.traced(lambda *given: (attend(*given[:3]), *(each * 1 for each in given[3:])), *given)
    ((attention, operands),) = attentions_of(gm)
    assert [operand.transposed for operand in operands] == [attend is spelt_out, False]
    read_sides(attention, operands, placeholders(gm.graph)[3:])
    out, *_ = finish(gm)(*given)
    torch.testing.assert_close(out, attend(q, v, k))
