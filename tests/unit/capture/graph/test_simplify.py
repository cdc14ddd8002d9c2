"""`simplify`: of each rule a graph before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from specache_fx.capture.graph.graph_utils import placeholders, target_name
from specache_fx.capture.graph.simplify import RULES, simplify
from specache_fx.runtime.ops import SDPA

aten = torch.ops.aten
X, ROWS, HIDE = torch.zeros(2, 3, 4), torch.zeros(1, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
KEYS, MASK, NUMBER = torch.zeros(2, 3, 4, 5), torch.zeros(2, 1, 4, 4), torch.ones(())
NAMES = [rewrite.__name__ for _, rewrite in RULES]


class Case(NamedTuple):
    """A function of `x`, `y` and `z`, and its calls before and after some of the rules."""

    rules: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    before: str
    after: str


def attend(x: Tensor, mask: Tensor) -> Tensor:
    return SDPA(x, x, x, mask, 0.0, False, None, False)


CASES = [
    Case(
        "_as_reshape",
        lambda x: aten.view(x, [6, 4]),
        (X,),
        """
        view = view(x, [6, 4])
        return view
        """,
        """
        view = reshape(x, [6, 4])
        return view
        """,
    ),
    Case(
        "_as_transposes",
        lambda x: x.permute(1, 0, 2),
        (X,),
        """
        permute = permute(x, [1, 0, 2])
        return permute
        """,
        """
        permute = transpose(x, 0, 1)
        return permute
        """,
    ),
    Case(
        "_as_transposes",
        lambda x: x.permute(0, 2, 3, 1),
        (KEYS,),
        """
        permute = permute(x, [0, 2, 3, 1])
        return permute
        """,
        """
        transpose_int = transpose(x, 1, 2)
        permute = transpose(transpose_int, 2, 3)
        return permute
        """,
    ),
    Case(
        "_as_transposes",
        lambda x: x.permute(0, 1, 2).exp(),
        (X,),
        """
        permute = permute(x, [0, 1, 2])
        exp = exp(permute)
        return exp
        """,
        """
        exp = exp(x)
        return exp
        """,
    ),
    Case(
        "_as_logical_not",
        lambda x: aten.eq.Scalar(x, False),
        (HIDE,),
        """
        eq = eq(x, False)
        return eq
        """,
        """
        eq = logical_not(x)
        return eq
        """,
    ),
    Case(
        "_with_defaults",
        lambda x: SDPA(x, x, x),
        (KEYS,),
        """
        scaled_dot_product_attention = scaled_dot_product_attention(x, x, x)
        return scaled_dot_product_attention
        """,
        """
        scaled_dot_product_attention = scaled_dot_product_attention(x, x, x, None, 0.0, False, None, False)
        return scaled_dot_product_attention
        """,
    ),
    Case(
        "_with_one_head_of_mask",
        lambda x, y: attend(x, y.expand(2, 3, 4, 4)),
        (KEYS, MASK),
        """
        expand = expand(y, [2, 3, 4, 4])
        scaled_dot_product_attention = scaled_dot_product_attention(x, x, x, expand)
        return scaled_dot_product_attention
        """,
        """
        expand = expand(y, [2, 3, 4, 4])
        scaled_dot_product_attention = scaled_dot_product_attention(x, x, x, y)
        return scaled_dot_product_attention
        """,
    ),
    Case(
        "_with_one_head_of_mask",
        lambda x, y: attend(x, y.expand(2, 3, 4, 4).exp()),
        (KEYS, MASK),
        """
        expand = expand(y, [2, 3, 4, 4])
        exp = exp(expand)
        scaled_dot_product_attention = scaled_dot_product_attention(x, x, x, exp)
        return scaled_dot_product_attention
        """,
        """
        expand = expand(y, [2, 3, 4, 4])
        exp = exp(expand)
        slice_tensor = slice(exp, 1, 0, 1)
        scaled_dot_product_attention = scaled_dot_product_attention(x, x, x, slice_tensor)
        return scaled_dot_product_attention
        """,
    ),
    Case(
        "_as_expand",
        lambda x: x.repeat(2, 1, 1).exp(),
        (ROWS,),
        """
        repeat = repeat(x, [2, 1, 1])
        exp = exp(repeat)
        return exp
        """,
        """
        repeat = expand(x, [2, -1, -1])
        exp = exp(repeat)
        return exp
        """,
    ),
    Case(
        "_as_expand",  # a cache has memory of its own
        lambda x: x.repeat(2, 1, 1),
        (ROWS,),
        """
        repeat = repeat(x, [2, 1, 1])
        return repeat
        """,
        """
        repeat = repeat(x, [2, 1, 1])
        return repeat
        """,
    ),
    Case(
        "_as_full",
        torch.full_like,
        (X, NUMBER),
        """
        _local_scalar_dense = _local_scalar_dense(y)
        full_like = full_like(x, _local_scalar_dense, pin_memory=False)
        return full_like
        """,
        """
        _local_scalar_dense = _local_scalar_dense(y)
        full_like = full([2, 3, 4], _local_scalar_dense, dtype=torch.float32, device=cpu)
        return full_like
        """,
    ),
    Case(
        "_as_where",
        lambda x, y, z: aten.index_put(x, [y], z),
        (X, HIDE, NUMBER),
        """
        index_put = index_put(x, [y], z)
        return index_put
        """,
        """
        unsqueeze_default = unsqueeze(y, -1)
        index_put = where(unsqueeze_default, z, x)
        return index_put
        """,
    ),
    Case(
        "_with_an_end",
        lambda x, y: torch.slice_scatter(x, y, 1, 1, 9),
        (X, X[:, 1:].clone()),
        """
        slice_scatter = slice_scatter(x, y, 1, 1, 9)
        return slice_scatter
        """,
        """
        slice_scatter = slice_scatter(x, y, 1, 1, 3, 1)
        return slice_scatter
        """,
    ),
    Case(
        "_broadcast",
        lambda x, y: x + y.expand(2, 3, 4),
        (X, ROWS),
        """
        expand = expand(y, [2, 3, 4])
        add = add(x, expand)
        return add
        """,
        """
        expand = expand(y, [2, 3, 4])
        add = add(x, y)
        return add
        """,
    ),
    Case(
        "_written_part",
        lambda x, y: torch.slice_scatter(x, y, 0, 0, 1)[:1].exp(),
        (X, ROWS),
        """
        slice_scatter = slice_scatter(x, y, 0, 0, 1)
        slice_1 = slice(slice_scatter, 0, 0, 1)
        exp = exp(slice_1)
        return exp
        """,
        """
        slice_scatter = slice_scatter(x, y, 0, 0, 1)
        exp = exp(y)
        return exp
        """,
    ),
    Case(
        "_as_reshape, _of_earlier_shape",
        lambda x: x.exp().reshape(6, 4).unsqueeze(0).reshape(2, 3, 4),
        (X,),
        """
        exp = exp(x)
        view = view(exp, [6, 4])
        unsqueeze = unsqueeze(view, 0)
        view_1 = view(unsqueeze, [2, 3, 4])
        return view_1
        """,
        """
        exp = exp(x)
        view = reshape(exp, [6, 4])
        unsqueeze = unsqueeze(view, 0)
        view_1 = reshape(exp, [2, 3, 4])
        return view_1
        """,
    ),
    Case(
        "_its_input",
        lambda x: aten.alias(x).exp(),
        (X,),
        """
        alias = alias(x)
        exp = exp(alias)
        return exp
        """,
        """
        exp = exp(x)
        return exp
        """,
    ),
    Case(
        "_undone",
        lambda x: x.transpose(1, 2).transpose(2, 1).exp(),
        (X,),
        """
        transpose = transpose(x, 1, 2)
        transpose_1 = transpose(transpose, 2, 1)
        exp = exp(transpose_1)
        return exp
        """,
        """
        transpose = transpose(x, 1, 2)
        exp = exp(x)
        return exp
        """,
    ),
    Case(
        "_undone",  # a cache, perhaps
        lambda x: x.transpose(1, 2).transpose(2, 1),
        (X,),
        """
        transpose = transpose(x, 1, 2)
        transpose_1 = transpose(transpose, 2, 1)
        return transpose_1
        """,
        """
        transpose = transpose(x, 1, 2)
        transpose_1 = transpose(transpose, 2, 1)
        return transpose_1
        """,
    ),
    Case(
        "_of_same_shape",
        lambda x: aten.slice.Tensor(x, 1, 0, 9).exp(),
        (X,),
        """
        slice_1 = slice(x, 1, 0, 9)
        exp = exp(slice_1)
        return exp
        """,
        """
        exp = exp(x)
        return exp
        """,
    ),
    Case(
        "_as_transposes, _called_before",
        lambda x: (x.transpose(1, 2), x.permute(0, 2, 3, 1).exp(), x.transpose(-3, -2).exp()),
        (KEYS,),
        """
        transpose = transpose(x, 1, 2)
        permute = permute(x, [0, 2, 3, 1])
        exp = exp(permute)
        transpose_1 = transpose(x, -3, -2)
        exp_1 = exp(transpose_1)
        return (transpose, exp, exp_1)
        """,
        """
        transpose = transpose(x, 1, 2)
        transpose_int = transpose(x, 1, 2)
        permute = transpose(transpose, 2, 3)
        exp = exp(permute)
        exp_1 = exp(transpose)
        return (transpose, exp, exp_1)
        """,
    ),
]


def traced(case: Case) -> GraphModule:
    gm: GraphModule = make_fx(case.function, tracing_mode="fake")(*case.inputs)
    for node, name in zip(placeholders(gm.graph), "xyz", strict=False):
        node._rename(name)
    return gm


def lines(gm: GraphModule) -> list[str]:
    """Calls and results, a line each."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    given = [[*map(str, node.args), *(f"{name}={x}" for name, x in node.kwargs.items())] for node in calls]
    shown = (
        f"{node.name} = {target_name(node)}({', '.join(args)})"
        for node, args in zip(calls, given, strict=True)
    )
    return [*shown, f"return {gm.graph.output_node().args[0]}"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rules)
def test_a_rule_rewrites_a_graph(case: Case) -> None:
    gm, rules = traced(case), [RULES[NAMES.index(name)] for name in case.rules.split(", ")]
    assert lines(gm) == case.before.split("\n        ")[1:-1]
    inputs = [torch.rand(each.shape).to(each.dtype) for each in case.inputs]
    expected = gm(*inputs)
    simplify(gm.graph, rules)
    gm.graph.lint()
    assert lines(gm) == case.after.split("\n        ")[1:-1]
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=0)


def test_each_rule_has_a_case() -> None:
    assert {name for case in CASES for name in case.rules.split(", ")} == {*NAMES}
