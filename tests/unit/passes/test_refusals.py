"""Every reason why `match_attention` leaves an attention alone: what it says, where it points, what to do about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from torch import Tensor

from specache_fx.capture.analyse import analyse
from specache_fx.capture.program import Phase, Program
from specache_fx.config import SpecacheConfig

HERE = Path(__file__).name
ALONE = "Let nothing but attention, and cat([past, new], dim=-2), read the cached tensors."
LEAVE = 'backend="inductor" compiles this model as it is.'


def tensors(
    head_dim: int = 8, dtype: torch.dtype = torch.float32, q_len: int = 1, past: int = 5
) -> list[Tensor]:
    """q, k, v, past keys and past values: 4 query heads, 2 kv heads."""
    shapes = [(2, 4, q_len), (2, 2, q_len), (2, 2, q_len), (2, 2, past), (2, 2, past)]
    return [torch.randn(*shape, head_dim, dtype=dtype) for shape in shapes]


def match(function: Callable[..., Any], *args: Tensor) -> Program:
    """What the pass says about a function's graph."""
    with torch.no_grad():
        (captured,) = graphs.capture(
            graphs.FunctionModule(function), lambda forward: forward(*(args or tensors()))
        )
    return graphs.matched(captured)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def append(past: Tensor, new: Tensor) -> Tensor:
    return torch.cat([past, new], dim=-2)


def plain(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values), keys, values


def with_dropout(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values, dropout_p=0.1), keys, values


def with_mask_per_head(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    shown = torch.arange(4)[:, None, None] <= torch.arange(keys.shape[-2])
    return sdpa(q, keys, values, attn_mask=shown[None]), keys, values


def with_mask_from_queries(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values, attn_mask=q[:, :1, :, :1].expand(2, 1, 1, 6)), keys, values


def keys_used_elsewhere(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values), keys, values, keys.sum()


def past_used_elsewhere(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values), keys, values, pk.mean()


def cache_not_returned(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values)


def sliding_window(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values), keys[:, :, -4:], values[:, :, -4:]


def oldest_tokens_returned(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values), keys[:, :, :4], values[:, :, :4]


def windows_that_differ(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values), keys[:, :, -4:], values[:, :, -3:]


def shared_cache(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(sdpa(q, keys, values), keys, values), keys, values


def shared_with_dropout(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(sdpa(q, keys, values), keys, values, dropout_p=0.1), keys, values


def one_tensor_for_both(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys = append(pk, k)
    return sdpa(q, keys, keys), keys


def causal_with_one_query(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), append(pv, v)
    return sdpa(q, keys, values, is_causal=True), keys, values


def past_of_keys_alone(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k), v.expand(2, 2, 6, 8).contiguous()
    return sdpa(q, keys, values), keys, values


def values_of_more_heads(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k)[:, :1].contiguous(), append(pv, v)
    return F.scaled_dot_product_attention(q[:, :2], keys, values), keys, values


def past_comes_last(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(k * 1, pk), append(v * 1, pv)
    return sdpa(q, keys, values), keys, values


def past_is_changed_first(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk * 2, k), append(pv * 2, v)
    return sdpa(q, keys, values), keys, values


def written_into_the_past(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    index = torch.tensor([4])
    keys, values = pk.index_copy(2, index, k), pv.index_copy(2, index, v)
    return sdpa(q, keys, values), keys, values


def three_parts(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = torch.cat([pk, k, k], -2), torch.cat([pv, v, v], -2)
    return sdpa(q, keys, values), keys, values


REASONS: dict[Callable[..., Any], tuple[str, str]] = {
    with_dropout: ("it has dropout", "Call model.eval() first."),
    with_mask_per_head: (
        "its mask hides other keys from head to head",
        f"Give it one mask for all heads, [batch, 1, q_len, kv_len]. {LEAVE}",
    ),
    with_mask_from_queries: (
        "its mask (`expand`, HERE: return sdpa(q, keys, values, attn_mask=q[:, :1, :, :1].expand(2, 1, 1, 6)), keys,"
        " values) is computed from data (`l_args_0_`), not from positions and padding alone",
        LEAVE,
    ),
    keys_used_elsewhere: (
        "its keys are also used by `sum_1` (sum, HERE: return sdpa(q, keys, values), keys, values, keys.sum())",
        f"{ALONE} {LEAVE}",
    ),
    past_used_elsewhere: (
        "its past keys are also used by `mean` (mean, HERE: return sdpa(q, keys, values), keys, values, pk.mean())",
        f"{ALONE} {LEAVE}",
    ),
    past_is_changed_first: (
        "what is appended to is not the past as it came in, but what `mul` (mul, HERE: keys, values = append(pk * 2,"
        " k), append(pv * 2, v)) makes of it",
        f"Append this call's tokens to the past itself: cat([past, new], dim=-2). {LEAVE}",
    ),
    cache_not_returned: (
        "neither its whole keys nor the newest of them are what the model returns as its cache",
        f"Return cat([past, new], dim=-2) itself or its last tokens, [:, :, -n:]. {LEAVE}",
    ),
    oldest_tokens_returned: (
        "neither its whole keys nor the newest of them are what the model returns as its cache",
        f"Return cat([past, new], dim=-2) itself or its last tokens, [:, :, -n:]. {LEAVE}",
    ),
    windows_that_differ: ("its keys and its values are cached for different numbers of tokens", LEAVE),
    one_tensor_for_both: ("its keys and values are one tensor", LEAVE),
    causal_with_one_query: ("it is causal with one query, which hides all keys but the first", LEAVE),
    past_of_keys_alone: ("only one of its keys and values has a past", LEAVE),
}


def test_plain_attention_is_matched() -> None:
    program = match(plain)
    assert (program.phase, len(program.sites), program.refusals) == (Phase.DECODE, 1, ())
    assert (program.sites[0].num_kv_heads, program.sites[0].key_dim, program.sites[0].core.scale) == (
        2,
        8,
        8**-0.5,
    )


def test_window_is_matched_with_its_length() -> None:
    program = match(sliding_window)
    assert (program.phase, program.refusals) == (Phase.DECODE, ())
    assert [(site.keys.window, site.shared) for site in program.sites] == [(5, False)]


def test_second_attention_over_a_cache_is_matched_as_its_sharer() -> None:
    program = match(shared_cache)
    assert (program.phase, program.refusals) == (Phase.DECODE, ())
    assert [(site.layer, site.shared) for site in program.sites] == [(0, False), (0, True)]


def test_cache_that_a_refused_attention_reads_too_is_left_alone() -> None:
    program = match(shared_with_dropout)
    assert (program.phase, program.sites) == (Phase.NO_CACHE, ())
    assert [refusal.reason for refusal in program.refusals] == [
        "it has dropout",
        "its cache is also read by attention `scaled_dot_product_attention_1`, which is left alone",
    ]


@pytest.mark.parametrize("function", REASONS, ids=lambda function: function.__name__)
def test_refusal_says_the_reason_the_line_and_the_remedy(function: Callable[..., Any]) -> None:
    program = match(function)
    assert (program.phase, program.sites) == (Phase.NO_CACHE, ())
    (refusal,) = program.refusals
    reason = re.sub(rf"\S*{re.escape(HERE)}:\d+", "HERE", refusal.reason)
    assert (reason, refusal.remedy) == REASONS[function]
    assert f"{HERE}:" in refusal.source
    assert "scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)" in refusal.source
    assert str(refusal) == (
        f"attention `{refusal.node}` ({refusal.source}) is left alone: {refusal.reason}. {refusal.remedy}"
    )


@pytest.mark.parametrize(
    "function",
    [values_of_more_heads, past_comes_last, written_into_the_past, three_parts],
    ids=lambda function: function.__name__,
)
def test_cache_that_is_no_append_to_the_past_is_refused_and_not_taken_for_a_prompt(
    function: Callable[..., Any],
) -> None:
    # Taken for a prefill it would read the handles' NaN.
    program = match(function)
    assert (program.phase, program.sites) == (Phase.NO_CACHE, ())
    assert len(program.refusals) == 1


def test_refusal_of_rows_too_small_for_a_handle_names_the_least_head_dim() -> None:
    (refusal,) = match(plain, *tensors(head_dim=1)).refusals
    assert refusal.reason.startswith("its head_dim of 1 is under ")


def test_refusal_of_keys_without_heads_says_their_shape() -> None:
    def flat(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keys, values = k * 2, v * 2
        return F.scaled_dot_product_attention(q, keys, values), keys, values

    (refusal,) = match(flat, *(torch.randn(2, 3, 8) for _ in range(3))).refusals
    assert refusal.reason == "its keys have shape [2, 3, 8], not [batch, num_kv_heads, kv_len, head_dim]"


def test_refusal_of_a_past_beside_none_says_so() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
        keys, values, own_keys, own_values = append(pk, k), append(pv, v), k * 2, v * 2
        return sdpa(q, keys, values) + sdpa(q, own_keys, own_values), keys, values, own_keys, own_values

    program = match(mixed)
    assert len(program.sites) == 1
    assert [refusal.reason for refusal in program.refusals] == [
        "it has a past and others in the graph have none, or the reverse"
    ]


def test_attention_over_no_cache_is_left_without_a_word() -> None:
    program = match(lambda q, k, v: sdpa(q, k * 2, v), *tensors()[:3])
    assert (program.phase, program.sites, program.refusals) == (Phase.NO_CACHE, (), ())


def test_refusals_leave_the_graph_as_it_is() -> None:
    (captured,) = graphs.capture(graphs.FunctionModule(with_dropout), lambda forward: forward(*tensors()))
    gm = captured.copy()
    before = graphs.code(gm)
    analyse(gm, SpecacheConfig())
    assert graphs.code(gm) == before
