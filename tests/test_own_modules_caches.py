"""Modules that people write for themselves, in whatever they hand over their past KV: rewritten, or left alone."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.own_modules import CONTAINERS, Layout, OwnConfig, OwnDecoder, Run, greedy

import specache_fx

OPTIONS: dict[str, Any] = {"group_size": 8, "residual_length": 8, "top_k": 8, "lowering": "eager"}
# Two ways of being exact: nothing is lost by quantising, or every low-bit pair is replaced by its original in time.
EXACT: dict[str, dict[str, Any]] = {"16 bits": {"bits": 16}, "all staged": {"bits": 1, "top_k": 64}}
LAYOUTS = [layout for layout in get_args(Layout) if layout != "heads first"]


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
    assert type(ours.cache[0]) is type(plain.cache[0])


def assert_equal(ours: Run, plain: Run) -> None:
    assert torch.equal(ours.tokens, plain.tokens)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_is_rewritten_and_equal(container: str, kind: Literal["gpt", "llama"]) -> None:
    gpt = kind == "gpt"
    config = OwnConfig(kind, container, num_kv_heads=4 if gpt else 2)
    assert_rewritten_and_equal(config, padded=gpt, **EXACT["all staged" if gpt else "16 bits"])


@settings(max_examples=4)
@given(
    kind=st.sampled_from(["gpt", "llama"]),
    container=st.sampled_from(sorted(CONTAINERS)),
    num_layers=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 4), (6, 2)]),
    padded=st.booleans(),
    exact=st.sampled_from(sorted(EXACT)),
)
def test_any_shape_is_rewritten_and_equal(
    kind: Literal["gpt", "llama"],
    container: str,
    num_layers: int,
    heads: tuple[int, int],
    padded: bool,
    exact: str,
) -> None:
    num_heads, num_kv_heads = heads
    config = OwnConfig(kind, container, "heads first", num_layers, num_heads, num_kv_heads)
    assert_rewritten_and_equal(config, padded, **EXACT[exact])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_prompt_of_one_token_costs_no_guess(kind: Literal["gpt", "llama"]) -> None:
    """Dynamo makes its length a constant of the first step's graph: the next position can't be told there."""
    model = OwnDecoder(OwnConfig(kind, num_kv_heads=4 if kind == "gpt" else 2))
    plain = greedy(model, padded=False, prompt=1)
    ours = greedy(
        torch.compile(model, backend="specache", options={**OPTIONS, "bits": 16}), padded=False, prompt=1
    )
    assert_equal(ours, plain)
    assert specache_fx.stats(ours.cache).exact_hit_rate == 1.0


@pytest.mark.usefixtures("fresh_dynamo")
def test_explain_names_lanes_and_line_of_an_own_module() -> None:
    report = specache_fx.explain(OwnDecoder(OwnConfig(container="dicts")), run=lambda m: greedy(m, True, 4))
    assert "prefill, 2 attentions rewritten, 0 left alone" in str(report)
    assert "decode, 2 lanes, 2 attentions rewritten, 0 left alone" in str(report)
    assert "own_modules.py" in report.graphs[1].rewritten[0]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("layout", LAYOUTS)
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
    with pytest.raises(specache_fx.CacheHandleError, match="left alone"):
        specache_fx.stats(ours.cache)
    (warning,) = (record.message for record in caplog.records)
    assert "own_modules.py" in warning and "another layout, a stack" in warning
    assert "Return cat([past, new], dim=-2) itself" in warning
