"""Every reason why `match_attention` leaves an attention alone: what it says, where it points, what to do about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
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


def attended(q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return sdpa(q, keys, values, **options), keys, values


def after(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read(q, keys, values)` after this call's tokens were appended to the past."""
    return lambda q, k, v, pk, pv: read(q, append(pk, k), append(pv, v))


plain = after(attended)
with_dropout = after(partial(attended, dropout_p=0.1))


def with_mask_from_queries(q: Tensor, keys: Tensor, values: Tensor) -> Any:
    return attended(q, keys, values, attn_mask=q[:, :1, :, :1].expand(2, 1, 1, 6))


def keys_used_elsewhere(q: Tensor, keys: Tensor, values: Tensor) -> Any:
    return *attended(q, keys, values), keys.sum()


def repeated_keys_used_elsewhere(q: Tensor, keys: Tensor, values: Tensor) -> Any:
    repeated = keys.repeat_interleave(2, 1)
    return sdpa(q, repeated, values.repeat_interleave(2, 1)), keys, values, repeated.sum()


def past_used_elsewhere(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    return *attended(q, append(pk, k), append(pv, v)), pk.mean()


def past_is_changed_first(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    return attended(q, append(pk * 2, k), append(pv * 2, v))


def values_of_more_heads(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    keys, values = append(pk, k)[:, :1].contiguous(), append(pv, v)
    return F.scaled_dot_product_attention(q[:, :2], keys, values), keys, values


def with_mask_per_head(q: Tensor, keys: Tensor, values: Tensor) -> Any:
    shown = torch.arange(4)[:, None, None] <= torch.arange(keys.shape[-2])
    return attended(q, keys, values, attn_mask=shown[None])


NOT_RETURNED = (
    "neither its whole keys nor the newest of them are what the model returns as its cache",
    f"Return cat([past, new], dim=-2) itself or its last tokens, [:, :, -n:]. {LEAVE}",
)
REASONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "dropout": (with_dropout, "it has dropout", "Call model.eval() first."),
    "mask per head": (
        after(with_mask_per_head),
        "its mask has 4 heads, and may hide other keys from head to head",
        f"Give it one mask for all heads, [batch, 1, q_len, kv_len]. {LEAVE}",
    ),
    "mask from queries": (
        after(with_mask_from_queries),
        "its mask (`expand`, HERE: return attended(q, keys, values, attn_mask=q[:, :1, :, :1].expand(2, 1, 1, 6)))"
        " is computed from data (`l_args_0_`), not from positions and padding alone",
        LEAVE,
    ),
    "keys used elsewhere": (
        after(keys_used_elsewhere),
        "its keys are also used by `sum_1` (sum, HERE: return *attended(q, keys, values), keys.sum())",
        f"{ALONE} {LEAVE}",
    ),
    "repeated keys used elsewhere": (
        after(repeated_keys_used_elsewhere),
        "`sum_1` (sum) reads its `repeated` too",
        LEAVE,
    ),
    "past used elsewhere": (
        past_used_elsewhere,
        "its past keys are also used by `mean` (mean, HERE: return *attended(q, append(pk, k), append(pv, v)),"
        " pk.mean())",
        f"{ALONE} {LEAVE}",
    ),
    "past changed first": (
        past_is_changed_first,
        "what is appended to is not the past as it came in, but what `mul` (mul, HERE: return attended(q,"
        " append(pk * 2, k), append(pv * 2, v))) makes of it",
        f"Append this call's tokens to the past itself: cat([past, new], dim=-2). {LEAVE}",
    ),
    "cache not returned": (after(sdpa), *NOT_RETURNED),
    "oldest tokens returned": (
        after(lambda q, keys, values: (sdpa(q, keys, values), keys[:, :, :4], values[:, :, :4])),
        *NOT_RETURNED,
    ),
    "windows that differ": (
        after(lambda q, keys, values: (sdpa(q, keys, values), keys[:, :, -4:], values[:, :, -3:])),
        "its keys and its values are cached for different numbers of tokens",
        LEAVE,
    ),
    "one tensor for both": (
        lambda q, k, v, pk, pv: (sdpa(q, keys := append(pk, k), keys), keys),
        "its keys and values are one tensor",
        LEAVE,
    ),
    "causal with one query": (
        after(partial(attended, is_causal=True)),
        "it is causal with one query, which hides all keys but the first",
        LEAVE,
    ),
    "past of keys alone": (
        lambda q, k, v, pk, pv: attended(q, append(pk, k), v.expand(2, 2, 6, 8).contiguous()),
        "only one of its keys and values has a past",
        LEAVE,
    ),
}


def test_plain_attention_is_matched() -> None:
    program = match(plain)
    assert (program.phase, len(program.sites), program.refusals) == (Phase.DECODE, 1, ())
    assert (
        program.sites[0].shape.num_kv_heads,
        program.sites[0].shape.key_dim,
        program.sites[0].core.scale,
    ) == (
        2,
        8,
        8**-0.5,
    )


def test_window_is_matched_with_its_length() -> None:
    program = match(
        after(lambda q, keys, values: (sdpa(q, keys, values), keys[:, :, -4:], values[:, :, -4:]))
    )
    assert (program.phase, program.refusals) == (Phase.DECODE, ())
    assert [(site.keys.window, site.shared) for site in program.sites] == [(5, False)]


def test_second_attention_over_a_cache_is_matched_as_its_sharer() -> None:
    program = match(after(lambda q, keys, values: attended(sdpa(q, keys, values), keys, values)))
    assert (program.phase, program.refusals) == (Phase.DECODE, ())
    assert [(site.layer, site.shared) for site in program.sites] == [(0, False), (0, True)]


def test_cache_that_a_refused_attention_reads_too_is_left_alone() -> None:
    read = partial(attended, dropout_p=0.1)
    program = match(after(lambda q, keys, values: read(sdpa(q, keys, values), keys, values)))
    assert (program.phase, program.sites) == (Phase.NO_CACHE, ())
    assert [refusal.reason for refusal in program.refusals] == [
        "it has dropout",
        "its cache is also read by attention `scaled_dot_product_attention_1`, which is left alone",
    ]


@pytest.mark.parametrize("name", REASONS)
def test_refusal_says_the_reason_the_line_and_the_remedy(name: str) -> None:
    function, *expected = REASONS[name]
    program = match(function)
    assert (program.phase, program.sites) == (Phase.NO_CACHE, ())
    (refusal,) = program.refusals
    reason = re.sub(rf"\S*{re.escape(HERE)}:\d+", "HERE", refusal.reason)
    assert [reason, refusal.remedy] == expected
    assert f"{HERE}:" in refusal.source
    assert "scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)" in refusal.source
    assert str(refusal) == (
        f"attention `{refusal.node}` ({refusal.source}) is left alone: {refusal.reason}. {refusal.remedy}"
    )


@pytest.mark.parametrize(
    "function",
    [
        values_of_more_heads,
        lambda q, k, v, pk, pv: attended(q, append(k * 1, pk), append(v * 1, pv)),
        lambda q, k, v, pk, pv: attended(
            q, *(past.index_copy(2, torch.tensor([4]), new) for past, new in ((pk, k), (pv, v)))
        ),
        lambda q, k, v, pk, pv: attended(q, torch.cat([pk, k, k], -2), torch.cat([pv, v, v], -2)),
    ],
    ids=["values of more heads", "past comes last", "written into the past", "three parts"],
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


def one_mask_for_all_heads(q: Tensor, keys: Tensor, values: Tensor) -> Any:
    hidden = (torch.arange(keys.shape[-2]) < 2).expand(2, 4, 1, -1)
    return attended(q, keys, values, attn_mask=~hidden[..., : keys.shape[-2]])


def heads_repeated_by_views(q: Tensor, keys: Tensor, values: Tensor) -> Any:
    def repeated(x: Tensor) -> Tensor:
        batch, heads, tokens, dim = x.shape
        return x.view(batch, heads, 1, tokens, dim).repeat(1, 1, 2, 1, 1).view(batch, -1, tokens, dim)

    return F.scaled_dot_product_attention(q, repeated(keys), repeated(values)), keys, values


def test_one_mask_that_is_expanded_over_heads_is_one_mask() -> None:
    program = match(after(one_mask_for_all_heads))
    assert len(program.sites) == 1 and not program.refusals


def test_heads_that_views_repeat_are_groups() -> None:
    (site,) = match(after(heads_repeated_by_views)).sites
    assert site.expansion is None and site.shape.num_kv_heads == 2


def filled_from_a_tensor(q: Tensor, keys: Tensor, values: Tensor, fill: Tensor, number: float | None) -> Any:
    keys, values = (x.repeat_interleave(2, dim=1) for x in (keys, values))
    shown = torch.arange(keys.shape[-2]) > 1
    scores = torch.where(shown, q @ keys.transpose(-1, -2), fill if number is None else number)
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("number", [None, -torch.inf])
def test_scores_that_a_tensor_fills_and_that_a_number_fills(number: float | None) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, fill: Tensor) -> Any:
        keys, values = append(pk, k), append(pv, v)
        return filled_from_a_tensor(q, keys, values, fill, number), keys, values

    program = match(step, *tensors(), torch.tensor(-torch.inf))
    if number is not None:
        assert len(program.sites) == 1
        return
    (refusal,) = program.refusals
    assert re.search(
        r"`\w+` \(where, .* makes other scores .* `\w+` may change: give the number itself", refusal.message
    )


def absorbed(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    """Latents of three dimensions, and scores that are the sum of two products."""
    latent, rotary = torch.cat([pk[:, 0], k[:, 0]], 1), torch.cat([pv[:, 0], v[:, 0]], 1)
    scores = torch.einsum("bhsc,btc->bhst", q, latent) + torch.einsum("bhsr,btr->bhst", q, rotary)
    return torch.einsum("bhst,btc->bhsc", scores.softmax(-1), latent), latent, rotary


def expanded(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
    """The same kind, as the remedy says."""
    latent, rotary = append(pk[:, :1], k[:, :1]), append(pv[:, :1], v[:, :1])
    keys = torch.cat([latent.expand(-1, 4, -1, -1), rotary.expand(-1, 4, -1, -1)], -1)
    return F.scaled_dot_product_attention(torch.cat([q, q], -1), keys, keys[..., :8]), latent, rotary


def test_absorbed_latents_are_named_by_the_softmax_that_reads_them() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, latent: Tensor, rotary: Tensor) -> Any:
        return absorbed(q, k, v, latent[:, None], rotary[:, None])

    q, k, v, past, other = tensors()
    refusals = match(step, q, k, v, past[:, 0], other[:, 0]).refusals
    assert len(refusals) == 2
    for refusal in refusals:
        assert re.search(
            r"its cache has shape .*, and `\w+` \(_softmax, .* reads it in another form", refusal.message
        )
        assert "latents that grow by cat as [batch, 1, kv_len, dim]" in refusal.remedy
    (site,) = match(expanded, q, k[:, :1], v[:, :1], past[:, :1], other[:, :1]).sites
    assert site.expansion is not None


def test_attention_that_pytorch_calls_inside_is_no_attention_to_put_there() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Any:
        keys, values = append(pk, k), append(pv, v)
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
        )[0]
        return out, keys, values

    told = {(refusal.reason, refusal.remedy) for refusal in match(step).refusals}
    ((reason, remedy),) = told
    assert reason == "another function calls it (torch.nn.MultiheadAttention?)"
    assert remedy.startswith("Call torch.nn.functional.scaled_dot_product_attention itself")


def test_a_write_that_is_not_known_is_named() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
        at = torch.full((2, 2, 1, 8), 3)
        keys.scatter_(2, at, k)
        values.scatter_(2, at, v)
        return sdpa(q, keys, values)

    (refusal,) = match(step).refusals
    assert re.search(
        r"its keys are computed from a cache of fixed length that `\w+` \(scatter, ", refusal.message
    )
    assert "DynamicCache)" in refusal.remedy and "index_copy_" in refusal.message
