"""Masks that are computed apart from a graph."""

from __future__ import annotations

import torch
from support import graphs
from support.captured import captured

from specache_fx.capture.program import Phase


def test_a_step_evaluates_the_newest_querys_row_and_the_next_ones() -> None:
    taken = captured("tiny")[Phase.DECODE]
    program = graphs.matched(taken)
    assert program.decoding is not None
    masks = program.decoding.masks
    assert masks.layers == {0: 0, 1: 0} and masks.moves  # two layers share one mask
    (now,) = masks.now(taken.inputs)
    later = masks.ahead(taken.inputs, 1)
    assert later is not None and later[0].shape[-1] == now.shape[-1] + 1
    assert torch.equal(later[0][..., :-1], now)
    assert now[0].flatten().tolist()[:3] == [False, False, True]  # two tokens of padding


def test_layers_without_a_window_have_no_window_masks() -> None:
    program = graphs.matched(captured("tiny")[Phase.DECODE])
    assert program.decoding is not None and program.decoding.window_masks.layers == {}


def test_a_prompts_mask_of_every_query_may_follow_a_rule() -> None:
    taken = captured("tiny")[Phase.PREFILL]
    program = graphs.matched(taken)
    (part,) = program.prompt_masks
    assert set(program.rules.values()) == {0} and len(program.rules) == 2
    (mask,) = part(taken.inputs)
    assert mask.shape[-2:] == (6, 6)


def test_a_mask_of_attention_that_is_spelt_out_follows_none() -> None:
    program = graphs.matched(captured("eager")[Phase.PREFILL])
    assert (program.prompt_masks, program.rules) == ((), {})
