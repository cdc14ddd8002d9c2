"""Sink tokens: the first real ones of each sequence at 16 bits, whatever is appended, cut, copied or called padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import strategies
from torch import Tensor

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.layers.layer_cache import LayerCache
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.session.snapshot import fork

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 6


def session(policy: str, sink_tokens: int, group_size: int = 4, residual_length: int = 2) -> Session:
    config = SpecacheConfig(
        policy=policy,  # type: ignore[arg-type]
        bits=1,
        group_size=group_size,
        residual_length=residual_length,
        top_k=2,
        sink_tokens=sink_tokens,
        host="memory",
    )
    return Session(config, (LayerShape(HEADS, KEY_DIM, VALUE_DIM),), torch.float32, torch.device("cpu"))


def random_pairs(batch: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(batch, HEADS, tokens, KEY_DIM, generator=generator)
    return key, torch.randn(batch, HEADS, tokens, VALUE_DIM, generator=generator)


def layer_of(made: Session) -> LayerCache:
    (layer,) = made.layers
    assert isinstance(layer, LayerCache)
    return layer


def first_real(mask: Tensor, layer: LayerCache) -> list[list[int]]:
    """The sinks that a layer should hold: of each sequence's first real tokens those that are quantised."""
    count = layer.config.sink_tokens
    return [
        [token for token in row.nonzero().flatten().tolist()[:count] if token < layer.num_quantized]
        for row in mask
    ]


def check(layer: LayerCache, mask: Tensor, key: Tensor, value: Tensor) -> None:
    assert layer.sinks is not None
    held = [[token for token in row if token >= 0] for row in layer.sinks.indices.tolist()]
    assert held == first_real(mask, layer)
    for row, tokens in enumerate(held):
        exact = torch.cat([key[row, :, tokens], value[row, :, tokens]], dim=-1)
        assert torch.equal(layer.sinks.rows[row, :, : len(tokens)], exact)


@given(
    data=st.data(),
    policy=st.sampled_from(("specache", "kivi")),
    sink_tokens=st.integers(1, 9),
    sizes=st.lists(st.sampled_from((1, 1, 3, 8, 20)), min_size=1, max_size=6),
    seed=strategies.seeds,
)
def test_sinks_are_the_first_real_tokens_after_every_append_and_cut(
    data: st.DataObject, policy: str, sink_tokens: int, sizes: list[int], seed: int
) -> None:
    batch, total = 3, sum(sizes)
    made, (key, value) = session(policy, sink_tokens), random_pairs(batch, total, seed)
    mask, start = data.draw(strategies.key_masks(batch, total)), 0
    for size in sizes:
        part = slice(start, start + size)
        # The row of a query that sees nothing shows everything: what a mask says of a chunk that is padding.
        row = mask[:, : part.stop]
        row = torch.where(row.any(1, keepdim=True), row, True)
        made.store(0, key[:, :, part], value[:, :, part], row[:, None])
        start = part.stop
        if bool(mask[:, :start].any(1).all()):
            check(layer_of(made), mask[:, :start], key, value)
    made.advance(total, decoded=False)
    kept = data.draw(st.integers(1, total))
    made.rewind(kept)
    if kept < total:
        made.store(0, key[:, :, kept:], value[:, :, kept:], mask[:, None])
    check(layer_of(made), mask, key, value)
    made.close()


def test_a_cut_gives_exact_pairs_back_where_no_host_has_them() -> None:
    made, (key, value) = session("kivi", 3), random_pairs(2, 20, 0)
    made.store(0, key, value, None)
    made.advance(20, decoded=False)
    made.rewind(3)
    layer = layer_of(made)
    assert layer.num_quantized == 0
    for side, exact in zip(layer.window(), (key, value), strict=True):
        assert torch.equal(side, exact[:, :, :3])
    made.store(0, key[:, :, 3:], value[:, :, 3:], None)
    check(layer, torch.ones(2, 20, dtype=torch.bool), key, value)


@pytest.mark.parametrize("policy", ["specache", "kivi"])
def test_a_reordered_session_and_a_fork_have_their_rows_sinks(policy: str) -> None:
    made, (key, value) = session(policy, 4), random_pairs(3, 22, 1)
    mask = torch.arange(22)[None] >= torch.tensor([[0], [7], [19]])
    made.store(0, key, value, mask[:, None])
    made.advance(22, decoded=False)
    rows = torch.tensor([2, 0, 0, 1])
    twin = fork(made, rows.tolist())
    check(layer_of(twin), mask[rows], key[rows], value[rows])
    rows = torch.tensor([1, 1, 2])
    made.reorder(rows.tolist())
    check(layer_of(made), mask[rows], key[rows], value[rows])


def test_sinks_are_counted_and_their_scores_hidden() -> None:
    made, (key, value) = session("specache", 3), random_pairs(2, 22, 2)
    mask = torch.arange(22)[None] >= torch.tensor([[0], [20]])
    made.store(0, key, value, mask[:, None])
    without = session("specache", 0)
    without.store(0, key, value, mask[:, None])
    pairs, indices = 2 * 3 * HEADS * (KEY_DIM + VALUE_DIM) * 4, 2 * 3 * 4
    # Each fills whole cache lines.
    assert 0 <= made.device_bytes - without.device_bytes - (pairs + indices) < 2 * 64
    sinks = layer_of(made).sinks
    assert sinks is not None
    assert sinks.indices.tolist() == [[0, 1, 2], [-1, -1, -1]]
    scores = sinks.hide(torch.ones(2, 2, HEADS, 23))
    assert (scores[:, 0, :, :3] == -1).all()
    assert (scores[:, 0, :, 3:] == 1).all() and (scores[:, 1] == 1).all()
