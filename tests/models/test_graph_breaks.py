"""Models that Dynamo can't take in one graph: each piece is rewritten on its own, or left alone with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.hooked import Hooked, logits
from support.models import Block, TinyConfig, TinyDecoder, generate
from support.own_modules import OwnConfig, OwnDecoder, SwiGLU, greedy
from support.zoo import SMALL, build, left_padded
from torch import Tensor, nn

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {**SMALL, "bits": 1, "top_k": 64}
PROMPT = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))


class BreakBefore(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


class BreakInside(nn.Module):
    def __init__(self, inner: SwiGLU) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.inner.w1(x))
        torch._dynamo.graph_break()
        return self.inner.w2(gate * self.inner.w3(x))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("specache_fx")]


def assert_one_warning_that_names_the_break(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog)
    assert 'lookahead="token" is not possible here, "query" is used instead' in warning
    assert (
        "this graph takes no token ids (embeddings as input, several code books, or a graph break" in warning
    )


def break_after(module: nn.Module, args: Any, output: Any) -> Any:
    torch._dynamo.graph_break()
    return output


def test_an_own_module_with_a_break_in_each_layer_equals_itself(caplog: pytest.LogCaptureFixture) -> None:
    model = OwnDecoder(OwnConfig())
    plain = greedy(model, padded=True)
    first, second = model.mlps
    model.mlps = nn.ModuleList([BreakBefore(first), BreakInside(second)])
    with caplog.at_level("WARNING", logger="specache_fx"):
        options = {**OPTIONS, "track_hit_rates": "steps"}
        ours = greedy(torch.compile(model, backend="specache", options=options), padded=True)
    assert torch.equal(ours.tokens, plain.tokens)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-4)
    assert_one_warning_that_names_the_break(caplog)
    stats = specache_fx.stats(ours.cache)
    assert stats.exact_hit_rate is None and stats.topk_hit_rate == 1.0 and stats.kv_len == 36
    assert len(stats.hit_series) == stats.steps == 23  # a session a layer, whose steps are added up


@pytest.mark.parametrize("place", nightly_unless("".__eq__, ["", "self_attn.k_proj"]))
def test_llama_with_a_break_in_each_layer_equals_itself(place: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    kwargs: dict[str, Any] = {**left_padded(), "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**kwargs)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.get_submodule(place).register_forward_hook(break_after)
    model.compile(backend="specache", options={**OPTIONS, "track_hit_rates": "steps"})
    with caplog.at_level("WARNING", logger="specache_fx"):
        out = model.generate(**kwargs, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert_one_warning_that_names_the_break(caplog)
    stats = specache_fx.stats(out.past_key_values)  # a session a layer
    # Their steps are added up; at first nothing is quantised.
    rates = [step.topk_hit_rate for step in stats.hit_series]
    assert len(rates) == 11 and set(rates) == {None, 1.0}
    assert stats.exact_hit_rate is None and stats.topk_hit_rate == 1.0 and stats.steps == 11


class BreakAfterAttention(Block):
    """The loop over layers is where past and new are joined: Dynamo gives up its frame, and compiles what it calls."""

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().finish(hidden, attended)


class Broken(TinyDecoder):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.__class__ = BreakAfterAttention


def test_keys_that_are_joined_outside_of_the_graph_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Broken(TinyConfig(num_layers=1))
    plain = generate(model, PROMPT, 12)
    with caplog.at_level("WARNING", logger="specache_fx"):
        ours = generate(torch.compile(model, backend="specache", options=OPTIONS), PROMPT, 12)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.past, plain.past, rtol=1e-4, atol=1e-4)
    (warning,) = warnings_of(caplog)
    assert "its keys come into the graph whole" in warning and "graph_breaks" in warning
    assert "support/models.py" in warning


class BreaksBehindAppends(Hooked):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().attend(layer, q, k, v, hide)


def test_appends_whose_attention_is_in_another_graph_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(BreaksBehindAppends(), backend="specache", options=OPTIONS)
    with caplog.at_level("WARNING", logger="specache_fx"):
        torch.testing.assert_close(logits(compiled), logits(BreaksBehindAppends()))
    assert all("graph_breaks" in warning for warning in warnings_of(caplog))
    assert "nothing in this graph reads its cache" in caplog.text
    assert "its keys come into the graph whole" in caplog.text


@torch.no_grad()
def test_keys_that_come_whole_are_named_in_any_layout(caplog: pytest.LogCaptureFixture) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2))

    with caplog.at_level("WARNING", logger="specache_fx"):
        torch.compile(attend, backend="specache", options=OPTIONS)(
            torch.ones(1, 4, 1, 16), *torch.ones(2, 1, 9, 4, 16)
        )
    (warning,) = warnings_of(caplog)
    assert "its keys come into the graph whole" in warning


class BrokenSteps(Broken):
    """Broken only once there is a past: the prompt's graph is whole and returns handles."""

    def forward(self, input_ids: Tensor, past: Any = None, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        kind = Block if past is None else BreakAfterAttention
        for block in self.blocks:
            block.__class__ = kind
        return super().forward(input_ids, past, attention_mask)


def test_handles_that_are_appended_to_outside_of_any_graph_are_an_error() -> None:
    compiled = torch.compile(BrokenSteps(TinyConfig(num_layers=1)), backend="specache", options=OPTIONS)
    with pytest.raises(
        specache_fx.CacheHandleError, match="`cat` was called on a tensor of a KV cache of specache"
    ):
        generate(compiled, PROMPT, 4)


class BreaksInSteps(Hooked):
    """Its steps ask for a number in each layer, and its prompts don't."""

    num_layers = 2

    def run_layer(self, layer: int, x: Tensor, hide: Tensor, past: Any) -> Any:
        if past is not None:
            assert x.abs().max().item() < 1e9
        return super().run_layer(layer, x, hide, past)


def test_a_step_whose_graph_breaks_between_layers_is_told_so() -> None:
    compiled = torch.compile(BreaksInSteps(), backend="specache", options=OPTIONS)
    with pytest.raises(specache_fx.CacheHandleError, match="reads 1 of the 2 layers"):
        logits(compiled)
