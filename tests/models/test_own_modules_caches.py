"""Modules that people write for themselves, in whatever they hand over their past KV: rewritten, or left alone."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples, nightly_unless
from support.own_modules import (
    CONTAINERS,
    VOCAB_SIZE,
    Attention,
    Layout,
    OwnConfig,
    OwnDecoder,
    RepeatKV,
    Run,
    greedy,
)
from support.zoo import TWO_LANES
from torch import Tensor

import specache_fx
from specache_fx.runtime.handles import handle_tensor

OPTIONS = TWO_LANES
# Two ways of being exact: nothing is lost by quantising, or every low-bit pair is replaced by its original in time.
EXACT: dict[str, dict[str, Any]] = {"16 bits": {"bits": 16}, "all staged": {"bits": 1, "top_k": 64}}
TOKENS_FIRST: tuple[Layout, ...] = ("tokens first", "heads merged")
WINDOW = 6
STACKS: tuple[Layout, ...] = ("one tensor a layer", "one tensor")


def assert_rewritten_and_equal(config: OwnConfig, padded: bool, **options: Any) -> None:
    torch._dynamo.reset()
    plain = greedy(OwnDecoder(config), padded)
    ours = greedy(
        torch.compile(OwnDecoder(config), backend="specache", options={**OPTIONS, **options}), padded
    )
    assert_equal(ours, plain)
    stats = specache_fx.stats(ours.cache)
    assert (stats.kv_len, stats.steps) == (36, 23) and stats.prefetched_rows > 0
    assert (
        stats.exact_hit_rate == 1.0
    )  # the speculative token is always the next one: the second lane is right too
    assert isinstance(ours.cache[0], type(plain.cache[0]))


def assert_equal(ours: Run, plain: Run) -> None:
    assert torch.equal(ours.tokens, plain.tokens)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", nightly_unless(lambda kind: kind == "llama", ["gpt", "llama"]))
# Tuples and lists of pairs are in most other tests.
@pytest.mark.parametrize(
    "container", nightly_unless(lambda name: name not in ("tuples", "lists"), CONTAINERS)
)
def test_every_container_is_rewritten_and_equal(container: str, kind: Literal["gpt", "llama"]) -> None:
    gpt = kind == "gpt"
    layers = 2 if gpt or container in ("flat", "dataclass") else 1
    config = OwnConfig(kind, container, num_layers=layers, num_kv_heads=4 if gpt else 2)
    assert_rewritten_and_equal(config, padded=gpt, **EXACT["all staged" if gpt else "16 bits"])


@pytest.mark.nightly  # by day there is a conversation
@pytest.mark.parametrize("layout", TOKENS_FIRST)
@pytest.mark.parametrize("repeat_kv", ["interleave", "expand"])
def test_tokens_before_heads_are_rewritten_and_equal(repeat_kv: RepeatKV, layout: Layout) -> None:
    config = OwnConfig("llama", "tuples", layout, repeat_kv=repeat_kv)
    assert_rewritten_and_equal(config, padded=repeat_kv == "expand", **EXACT["all staged"])


class Windowed(torch.nn.Module):
    """Attends to the newest `WINDOW` tokens, and returns one less with tokens first, or a projection as it comes."""

    def __init__(self, is_merged: bool) -> None:
        super().__init__()
        self.is_merged = is_merged
        generator = torch.Generator().manual_seed(0)
        for name, sizes in {
            "table": (50, 32),
            "places": (64, 32),
            "q": (32, 32),
            "k": (32, 16),
            "v": (32, 16),
        }.items():
            self.register_buffer(name, torch.randn(sizes, generator=generator) / 4)

    def forward(self, ids: Tensor, position_ids: Tensor, past: Any = None) -> Any:
        """`past` holds keys and values of up to `WINDOW - 1` tokens."""
        x = self.table[ids] + self.places[position_ids]
        sides = x @ self.k, x @ self.v
        if not self.is_merged:
            sides = tuple(side.unflatten(2, (-1, 8)) for side in sides)
        if past is not None:
            sides = tuple(torch.cat(pair, 1) for pair in zip(past, sides, strict=True))
        heads = [(side.unflatten(2, (-1, 8)) if self.is_merged else side).transpose(1, 2) for side in sides]
        q_len, kv_len = ids.shape[1], sides[0].shape[1]
        rows, columns = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
        q = (x @ self.q).unflatten(2, (-1, 8)).transpose(1, 2)
        mask = (columns <= rows) & (columns > rows - WINDOW)
        out = F.scaled_dot_product_attention(q, *heads, attn_mask=mask, enable_gqa=True)
        return (x + out.transpose(1, 2).flatten(2)) @ self.table.T, tuple(
            side[:, 1 - WINDOW :] for side in sides
        )


@pytest.mark.parametrize("is_merged", nightly_unless(True.__eq__, [False, True]))
@torch.no_grad()
def test_a_window_of_another_form_is_rewritten_and_equal(is_merged: bool) -> None:
    def generated(model: Any) -> tuple[Tensor, Any]:
        logits, past = model(torch.arange(18).reshape(2, 9), torch.arange(9)[None])
        found = [logits[:, -1]]
        for place in range(9, 20):
            logits, past = model(found[-1].argmax(-1, keepdim=True), torch.tensor([[place]]), past)
            found.append(logits[:, -1])
        return torch.stack(found), past

    torch._dynamo.reset()
    expected, plain = generated(Windowed(is_merged))
    found, cache = generated(torch.compile(Windowed(is_merged), backend="specache", options=OPTIONS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert cache[0].shape == plain[0].shape and specache_fx.stats(cache).steps == 11


@torch.no_grad()
def converse(model: Any) -> tuple[list[Tensor], Any]:
    """Tokens before heads: prompt, decode, extend, decode, crop, fork, decode both, reorder, decode."""
    found: list[Tensor] = []
    state: Any = [torch.ones(2, 0, dtype=torch.bool), []]

    def call(count: int, seed: int, on: Any) -> None:
        ids = torch.randint(VOCAB_SIZE, (2, count), generator=torch.Generator().manual_seed(seed))
        on[0] = torch.cat((on[0], on[0].new_ones(2, count)), dim=1)
        logits, *on[1] = model(ids, on[0], *on[1])
        found.append(logits)

    for turn, counts in enumerate(([13, 1, 1, 1, 5, 1, 1, 1, 1], [1, 1, 1])):
        for i, count in enumerate(counts):
            call(count, 10 * turn + i, state)
        state = [state[0][:, :-4], [tuple((k[:, :-4], v[:, :-4]) for k, v in state[1][0])]]
    fork = copy.deepcopy(state)
    for i in range(3):
        call(1, 30 + i, state)
        call(1, 40 + i, fork)
    rows = torch.tensor([1, 0])
    pairs = tuple((k.index_select(0, rows), v.index_select(0, rows)) for k, v in fork[1][0])
    fork = [fork[0], [pairs]]
    for i in range(3):
        call(1, 50 + i, fork)
    return found, fork[1]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "layout", nightly_unless("heads merged".__eq__, TOKENS_FIRST)
)  # or `test_layouts.py`
def test_tokens_before_heads_through_a_conversation(layout: Layout) -> None:
    model = OwnDecoder(OwnConfig(layout=layout, num_layers=1, repeat_kv="expand"))
    expected, plain = converse(model)
    options = {**OPTIONS, **EXACT["all staged"]}
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    found, cache = converse(torch.compile(model, backend="specache", options=options))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert cache[0][0][0].shape == plain[0][0][0].shape
    assert specache_fx.stats(cache).kv_len == plain[0][0][0].shape[1]
    assert counters["unique_graphs"] <= 4


class OddAttention(Attention):
    """Its weights' square roots make it no attention in normal form: its cache stays in the graph."""

    def forward(
        self, x: Tensor, position_ids: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (
            linear(x).unflatten(2, (-1, self.config.head_dim)) for linear in (self.wq, self.wk, self.wv)
        )
        k, v = present = self.appended(k, v, past)
        if self.config.layout == "heads merged":
            k, v = (side.unflatten(2, (-1, self.config.head_dim)) for side in present)
        assert mask is not None
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).sqrt()
        return self.wo((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2)), present


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("layout", TOKENS_FIRST)
def test_tokens_before_heads_where_one_layer_is_left_alone(layout: Layout) -> None:
    model = OwnDecoder(OwnConfig("gpt", num_kv_heads=4, layout=layout))
    model.attentions[1].__class__ = OddAttention
    plain = greedy(model, padded=True)
    ours = greedy(torch.compile(model, backend="specache", options={**OPTIONS, "bits": 16}), padded=True)
    assert_equal(ours, plain)
    handle, left = ours.cache[0][0][0], ours.cache[0][1][1]
    assert handle_tensor.plain(handle).isnan().any(-1).all() and specache_fx.stats(ours.cache).steps == 23
    torch.testing.assert_close(left, plain.cache[0][1][1], rtol=1e-4, atol=1e-4)
    assert left.stride() == plain.cache[0][1][1].stride()


@settings(max_examples=examples(2))
@given(
    kind=st.sampled_from(["gpt", "llama"]),
    container=st.sampled_from(sorted(CONTAINERS)),
    num_layers=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 4), (6, 2)]),
    layout=st.sampled_from(["heads first", *TOKENS_FIRST]),
    padded=st.booleans(),
    exact=st.sampled_from(sorted(EXACT)),
)
def test_any_shape_is_rewritten_and_equal(
    kind: Literal["gpt", "llama"],
    container: str,
    num_layers: int,
    heads: tuple[int, int],
    layout: Layout,
    padded: bool,
    exact: str,
) -> None:
    num_heads, num_kv_heads = heads
    config = OwnConfig(kind, container, layout, num_layers, num_heads, num_kv_heads)
    assert_rewritten_and_equal(config, padded, **EXACT[exact])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", nightly_unless("gpt".__eq__, ["gpt", "llama"]))
def test_a_prompt_of_one_token_costs_no_guess(kind: Literal["gpt", "llama"]) -> None:
    """Dynamo makes its length a constant of the first step's graph: the next position can't be told there."""
    model = OwnDecoder(OwnConfig(kind, num_layers=1, num_kv_heads=4 if kind == "gpt" else 2))
    plain = greedy(model, padded=False, prompt=1)
    ours = greedy(
        torch.compile(model, backend="specache", options={**OPTIONS, "bits": 16}), padded=False, prompt=1
    )
    assert_equal(ours, plain)
    assert specache_fx.stats(ours.cache).exact_hit_rate == 1.0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("layout", nightly_unless("one tensor".__eq__, STACKS))
def test_another_layout_is_left_alone_with_the_remedy(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    config = OwnConfig(layout=layout)
    plain = greedy(OwnDecoder(config), padded=True)
    with caplog.at_level("WARNING", logger="specache_fx"):
        ours = greedy(torch.compile(OwnDecoder(config), backend="specache", options=OPTIONS), padded=True)
    assert_equal(ours, plain)
    for mine, theirs in zip(ours.cache, plain.cache, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(specache_fx.CacheHandleError, match="attention was left alone"):
        specache_fx.stats(ours.cache)
    (warning,) = (record.message for record in caplog.records)
    assert "own_modules.py" in warning and "another layout, or a stack" in warning
    assert "Return cat([past, new], dim=-2) itself" in warning
