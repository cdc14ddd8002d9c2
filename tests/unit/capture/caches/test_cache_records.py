"""Records of what keys and values are made of."""

from __future__ import annotations

import torch
from support import graphs

from specache_fx.capture.caches.cache_records import Tokens, Written, with_nodes
from specache_fx.runtime.handles.handle_form import HEADS_FIRST, TOKENS_FIRST


def written() -> Written:
    """Two tokens behind a past of five, which has tokens first."""
    gm = graphs.traced(
        lambda past, new: torch.cat([past, new.transpose(1, 2)], 1),
        torch.ones(2, 5, 4, 8),
        torch.ones(2, 4, 2, 8),
    )
    past, new, _, cache, _ = gm.graph.nodes
    return Written(cache, TOKENS_FIRST, 0, 4, False, new, HEADS_FIRST, past)


def test_sizes_are_those_of_the_forms_of_the_cache_and_of_this_calls_tokens() -> None:
    record = written()
    assert (record.capacity, record.q_len, record.is_input) == (7, 2, True)
    assert (record.before, record.window) == (Tokens.ANY, None)


def test_what_this_call_makes_is_no_input() -> None:
    record = written()
    assert not Written(record.tensor, TOKENS_FIRST, 0, 4, False, record.new, HEADS_FIRST).is_input


def test_nodes_are_exchanged_in_lists_of_records() -> None:
    record = written()
    (changed,) = with_nodes([record], lambda each: record.new if each is record.tensor else each)
    assert changed.tensor is record.new and changed.buffer is record.buffer and changed.form == record.form
