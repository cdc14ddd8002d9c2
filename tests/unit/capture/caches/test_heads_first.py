"""`heads_first`: which caches change their layout, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor
from torch.fx import GraphModule

from specache_fx.capture.analyse import analyse
from specache_fx.capture.graph.graph_utils import placeholders, shape_of, target_name
from specache_fx.capture.program import Phase, Program
from specache_fx.config import SpecacheConfig
from specache_fx.runners.border import as_taken
from specache_fx.runtime.handles.handle_form import joined
from specache_fx.runtime.ops import SDPA

CAT = torch.ops.aten.cat.default
Q, K, PAST = torch.randn(2, 4, 1, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 5, 2, 8)


def sdpa(q: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, keys, enable_gqa=True)


def run(function: Callable[..., Any], *tensors: Tensor) -> tuple[str, GraphModule, Program, Any]:
    """The graph before and after the pass, its program, and what it then returns."""
    (captured,) = graphs.capture(graphs.FunctionModule(function), lambda forward: forward(*tensors))
    gm = captured.copy()
    before = graphs.code(gm)
    program = analyse(gm, SpecacheConfig())
    for i in program.input_forms:
        assert shape_of(placeholders(gm.graph)[i])[1:3] in ((2, 5), (1, 5))  # type: ignore[index]
    results = gm(*as_taken(program, captured.inputs))
    swapped = [
        joined([out, *([] if form.values is None else [results[form.values]])], form.form) if form else out
        for out, form in ((out, program.output_forms.get(i)) for i, out in enumerate(results))
    ]
    values = {form.values for form in program.output_forms.values()}
    swapped = [out for i, out in enumerate(swapped) if i not in values]
    for mine, theirs in zip(swapped, captured.gm(*captured.inputs), strict=True):
        torch.testing.assert_close(mine, theirs)
    return before, gm, program, results


def reading(read: Callable[[Tensor, Tensor], Tensor], dim: int = 1) -> Callable[..., Any]:
    """Attention over the past and this call's keys, which are returned."""

    def function(q: Tensor, k: Tensor, past: Tensor) -> Any:
        keys = torch.cat([past, k], dim)
        return read(q, keys), keys

    return function


plain = reading(lambda q, keys: sdpa(q, keys.transpose(1, 2)))
TAKEN = {
    "transposed": plain,
    "permuted": reading(lambda q, keys: sdpa(q, keys.permute(0, 2, 1, 3)), -3),
    "interleaved": reading(lambda q, keys: sdpa(q, keys.repeat_interleave(2, dim=2).transpose(2, 1))),
    "expanded": reading(
        lambda q, keys: sdpa(
            q, keys[:, :, :, None, :].expand(2, 6, 2, 2, 8).reshape(2, 6, 4, 8).transpose(1, 2)
        )
    ),
}
LEFT: dict[str, Callable[..., Any]] = {
    "past read elsewhere": lambda q, k, past: (*plain(q, k, past), past.sum()),
    "cache read elsewhere": lambda q, k, past: (*(read := plain(q, k, past)), read[1].sum()),
    "repeated in other order": reading(lambda q, keys: sdpa(q, keys.repeat(1, 1, 2, 1).transpose(1, 2))),
    "last heads returned": lambda q, k, past: ((read := plain(q, k, past))[0], read[1][:, :, -1:]),
    "past comes last": lambda q, k, past: plain(q, past, k * 1),
    "read as it is": reading(
        lambda q, keys: F.scaled_dot_product_attention(q[:, :, :, :], keys[:, :4], keys[:, :4])
    ),
}


def test_sizes_are_read_in_the_new_layout() -> None:
    (captured,) = graphs.capture(graphs.FunctionModule(plain), lambda forward: forward(Q, K, PAST))
    gm = captured.copy()
    past = next(node for node in placeholders(gm.graph) if shape_of(node) == (2, 5, 2, 8))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        sizes = [gm.graph.call_function(torch.ops.aten.sym_size.int, (past, dim)) for dim in (1, 0)]
    output.args = ((*output.args[0], *sizes),)  # type: ignore[misc]
    program = analyse(gm, SpecacheConfig())
    assert len(program.input_forms) == 1
    assert gm(*as_taken(program, captured.inputs))[-2:] == (5, 2)


@pytest.mark.parametrize("name", TAKEN)
def test_append_to_tokens_becomes_one_to_heads(name: str) -> None:
    _, gm, program, results = run(TAKEN[name], Q, K, PAST)
    assert (len(program.input_forms), len(program.output_forms)) == (1, 1)
    assert results[next(iter(program.output_forms))].shape == (2, 2, 6, 8)
    names = [target_name(node) for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    assert names == ["transpose", "cat", "scaled_dot_product_attention"]
    assert next(node for node in gm.graph.nodes if node.target is SDPA).args[1].target is CAT  # type: ignore[union-attr]


def test_the_newest_tokens_of_another_form_are_a_window() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, past: Tensor, other: Tensor) -> Any:
        keys, values = torch.cat([past, k], 1), torch.cat([other, v], 1)
        read = (side.transpose(1, 2) for side in (keys, values))
        return F.scaled_dot_product_attention(q, *read, enable_gqa=True), keys[:, -5:], values[:, -5:]

    _, _, program, results = run(function, Q, K, K * 2, PAST, PAST * 2)
    (site,) = program.sites
    assert (site.keys.window, len(program.input_forms), len(program.output_forms)) == (6, 2, 2)
    assert results[1].shape == (2, 2, 5, 8)


@pytest.mark.parametrize("with_bias", [False, True])
def test_heads_that_spelt_out_attention_repeats_in_turn_are_groups(with_bias: bool) -> None:
    def pair(q: Tensor, k: Tensor, past: Tensor, other: Tensor) -> Any:
        keys, values = torch.cat([past, k], 2), torch.cat([other, k], 2)
        scores = (q @ keys.repeat(1, 2, 1, 1).mT).masked_fill(torch.arange(6) < 2, -torch.inf)
        scores = scores + torch.arange(4.0)[:, None, None] * torch.arange(6) if with_bias else scores
        return scores.softmax(-1) @ values.repeat(1, 2, 1, 1), keys, values

    pasts = (torch.randn(2, 2, 5, 8) for _ in range(2))
    _, _, program, _ = run(pair, Q, K.transpose(1, 2).contiguous(), *pasts)
    (site,) = program.sites
    assert (site.expansion, site.shape.num_kv_heads, site.core.is_turned) == (None, 2, True)


def test_repeated_heads_without_a_batch_are_rows_with_groups() -> None:
    def batchless(q: Tensor, k: Tensor, past: Tensor, other: Tensor) -> Any:
        keys, values = torch.cat([past, k], 1), torch.cat([other, k], 1)
        scores = q @ keys.repeat_interleave(2, 0).mT
        return scores.softmax(-1) @ values.repeat_interleave(2, 0), keys, values

    _, _, program, _ = run(batchless, Q[0], K[0].transpose(0, 1).contiguous(), *torch.randn(2, 2, 5, 8))
    (site,) = program.sites
    assert (shape_of(site.core.query), site.shape.num_kv_heads) == ((2, 2, 1, 8), 1)


@pytest.mark.parametrize("rotated", [8, 4])  # of 8 channels: a part of them is a cat, but none of tokens
def test_a_prompt_is_known_by_its_swapped_output(rotated: int) -> None:
    def prompt(q: Tensor, k: Tensor) -> Any:
        keys = k * 2 if rotated == 8 else torch.cat([k[..., :rotated] * 2, k[..., rotated:]], -1)
        return sdpa(q, keys.transpose(1, 2)), keys

    _, _, program, results = run(prompt, Q, K)
    assert program.input_forms == {} and len(program.output_forms) == 1
    assert results[next(iter(program.output_forms))].shape == (2, 2, 1, 8)


def values_read_by_another_layer(q: Tensor, k: Tensor) -> Any:
    """As of value residuals: an output is permuted, and something else than attention reads it, too."""
    values = k.transpose(1, 2) * 2
    return sdpa(q, values) + values.repeat(1, 2, 1, 1), values.transpose(1, 2)


def keys_multiplied_from_the_left(q: Tensor, k: Tensor) -> Any:
    keys = k.transpose(1, 2) * 2
    return torch.softmax(keys @ q[:, :2].transpose(2, 3), -1), keys


@pytest.mark.parametrize(
    ("function", "permuted"), [(values_read_by_another_layer, [1]), (keys_multiplied_from_the_left, [])]
)
def test_the_same_is_computed_of_an_output_that_is_no_cache(
    function: Callable[..., Any], permuted: list[int]
) -> None:
    _, _, program, _ = run(function, Q, K)
    assert program.input_forms == {} and list(program.output_forms) == permuted


@pytest.mark.parametrize("name", LEFT)
def test_what_is_read_in_another_way_is_left_alone(name: str) -> None:
    """It computes the same, in whatever form."""
    _, _, program, _ = run(LEFT[name], Q, K, PAST)
    assert not program.sites and program.phase is Phase.NO_CACHE
