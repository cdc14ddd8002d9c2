"""Masks of several tokens against the rule that nearly all follow, and attention by that rule against the mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specache_fx.runtime.graph import prompt_masks
from specache_fx.runtime.graph.graph_part import Part
from specache_fx.runtime.layers.masks import hides

OTHER, CAUSAL, BY_RULE = range(3)


def mask_of(q_len: int, window: int | None, real: Tensor) -> Tensor:
    """Of the newest keys' queries, written down one by one: bool `[batch, 1, q_len, kv_len]`."""
    kv_len = real.shape[1]
    mask = torch.zeros(len(real), 1, q_len, kv_len, dtype=torch.bool)
    for query, own in enumerate(range(kv_len - q_len, kv_len)):
        for key in range(own + 1):
            reached = window is None or own - key < window
            mask[:, 0, query, key] = real[:, key] & reached
    return mask


def verdict_of(q_len: int, window: int | None, real: Tensor) -> int:
    return CAUSAL if bool(real.all()) and (window is None or window >= real.shape[1]) else BY_RULE


@st.composite
def rules(draw: st.DrawFn) -> tuple[int, int | None, Tensor]:
    q_len, before, batch = draw(st.integers(2, 12)), draw(st.integers(0, 9)), draw(st.integers(1, 3))
    window = draw(st.none() | st.integers(1, 20))
    row = st.lists(st.booleans(), min_size=before + q_len, max_size=before + q_len)
    real = torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))
    return q_len, window, real | torch.tensor(draw(st.booleans()))


@settings(deadline=None, max_examples=150)
@given(rules(), st.data())
def test_a_mask_that_follows_the_rule_is_told_from_one_that_does_not(
    rule: tuple[int, int | None, Tensor], data: st.DataObject
) -> None:
    q_len, window, real = rule
    before = real.shape[1] - q_len
    mask = mask_of(q_len, window, real)
    verdict, told = prompt_masks.check_mask_rule(mask, window)
    assert int(verdict) == verdict_of(q_len, window, real)
    reached = max(0, before + 1 - (window or real.shape[1]))  # the first key that a query sees
    assert torch.equal(told[:, 0, reached:], real[:, reached:])
    # One number that is another: of a query after the first, which tells what is real, and not of its own key.
    batch, query = data.draw(st.integers(0, len(real) - 1)), data.draw(st.integers(1, q_len - 1))
    key = data.draw(st.integers(0, real.shape[1] - 1).filter(lambda key: key != before + query))
    changed = mask.clone()
    changed[batch, 0, query, key] ^= True
    assert int(prompt_masks.check_mask_rule(changed, window)[0]) == OTHER


@settings(deadline=None, max_examples=60)
@given(rules(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_a_mask_of_numbers_follows_the_rule_where_it_hides_no_whole_row(
    rule: tuple[int, int | None, Tensor], dtype: torch.dtype
) -> None:
    q_len, window, real = rule
    mask = torch.zeros(len(real), 1, q_len, real.shape[1], dtype=dtype).masked_fill(
        ~mask_of(q_len, window, real), torch.finfo(dtype).min
    )
    expected = CAUSAL if verdict_of(q_len, window, real) == CAUSAL else OTHER
    assert int(prompt_masks.check_mask_rule(mask, window)[0]) == expected
    mask[0, 0, 1, 0] = 0.5  # adds something
    assert int(prompt_masks.check_mask_rule(mask, window)[0]) == OTHER
    mask[0, 0, 1, 0] = -3  # hides nothing
    assert not hides(mask)[0, 0, 1, 0]
    assert int(prompt_masks.check_mask_rule(mask, window)[0]) == OTHER


@settings(deadline=None, max_examples=60)
@given(rules(), st.integers(1, 5), st.sampled_from([1, 2, 3]), st.sampled_from([0, 128]), st.booleans())
def test_attention_by_the_rule_is_that_of_the_mask(
    rule: tuple[int, int | None, Tensor], block: int, groups: int, few: int, reads_shared: bool
) -> None:
    q_len, window, real = rule
    generator = torch.Generator().manual_seed(q_len)
    query = torch.randn(len(real), 2 * groups, q_len, 8, generator=generator)
    key = torch.randn(len(real), 2, real.shape[1], 8, generator=generator)
    value = torch.randn(len(real), 2, real.shape[1], 6, generator=generator)
    mask = mask_of(q_len, window, real)
    verdict, told = prompt_masks.check_mask_rule(mask, window)
    made: list[Tensor] = []
    whole = Part(lambda mask: (made.append(mask), (mask,))[1], (0,))
    masks = prompt_masks.PromptMasks([whole], [mask])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_masks, "_BLOCK", block)
        patch.setattr(prompt_masks, "_FEW", few)
        patch.setattr(prompt_masks, "_reads_shared", lambda query: reads_shared)
        out = prompt_masks.attend(masks, query, key, value, verdict, told, 0, 0.3, window)
    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=groups > 1)
    torch.testing.assert_close(out, expected)
    assert out.transpose(1, 2).is_contiguous()
    causal = int(verdict) == CAUSAL and q_len == real.shape[1]
    assert bool(made) == (window is None and q_len <= block and not causal)


@pytest.mark.parametrize("shape", [(7, 7), (1, 7, 7), (3, 1, 7, 7)], ids=str)
@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("block", [3, 512])
@pytest.mark.parametrize("reads_shared", [True, False])
def test_queries_of_a_group_follow_any_mask(
    shape: tuple[int, ...], is_bool: bool, block: int, reads_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(shape, generator=generator)
    mask = mask > -1 if is_bool else mask
    query = torch.randn(3, 6, 7, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 7, 8, generator=generator).unbind()
    monkeypatch.setattr(prompt_masks, "_BLOCK", block)
    monkeypatch.setattr(prompt_masks, "_reads_shared", lambda query: reads_shared)
    masks = prompt_masks.PromptMasks([Part(torch.fx.symbolic_trace(lambda mask: (mask,)), (0,))], [mask])
    other = torch.tensor(OTHER)
    out = prompt_masks.attend(masks, query, key, value, other, torch.ones(7, dtype=torch.bool), 0, 0.3)
    repeated = (side.repeat_interleave(3, 1) for side in (key, value))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, *repeated, mask, scale=0.3))


def test_another_mask_is_made_once_for_all_layers() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x > 0,))
    numbers = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = prompt_masks.PromptMasks([Part(graph, (1,))], [None, numbers])
    sides = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(1)).unbind()
    verdict, real = prompt_masks.check_mask_rule(numbers > 0, None)
    outs = [prompt_masks.attend(masks, *sides, verdict, real, 0, 0.5) for _ in range(2)]
    made = masks.make(0)
    expected = F.scaled_dot_product_attention(*sides, numbers > 0, scale=0.5)
    for out in outs:
        torch.testing.assert_close(out, expected)
    assert masks.make(0) is made
