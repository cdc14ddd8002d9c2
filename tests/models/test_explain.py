"""`explain()`: what it says of rewritten graphs, of refusals and of fallbacks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import TinyConfig, TinyDecoder, generate
from support.zoo import build

import specache_fx
from specache_fx import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DECODE_LAYER = ["wait_prefetch", "quantized_attention", "append", "topk", "prefetch"]


def _run(model: torch.nn.Module) -> None:
    generate(model, torch.arange(24).view(2, 12) % 61, 4)


def test_a_model_that_has_nothing_to_begin_with_is_named() -> None:
    with pytest.raises(ConfigError, match="give it input_ids"):
        specache_fx.explain(build("llama", bos_token_id=None))


@pytest.mark.parametrize("ids", ["text", [[1, 2]], torch.ones(3), torch.ones(1, 3)], ids=str)
def test_ids_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"input_ids are .*: give .*integers \[batch, tokens\]"):
        specache_fx.explain(build("llama", 1), input_ids=ids)


def test_every_graph_is_named_with_its_phase_and_the_decode_ops_are_shown() -> None:
    report = specache_fx.explain(
        TinyDecoder(TinyConfig()), options={"bits": 1, "top_k": 4, "lookahead": "token"}, run=_run
    )
    assert [graph.phase.value for graph in report.graphs][:2] == ["prefill", "decode"]
    assert "graph 0: prefill, 2 attentions rewritten, 0 left alone" in str(report)
    assert "decode, 2 lanes, 2 attentions rewritten, 0 left alone" in str(report)
    assert all("support/models.py" in graph.rewritten[0] for graph in report.graphs[:2])
    assert "scaled_dot_product_attention" in report.graphs[1].before
    assert re.findall(r"= specache\.(\w+)\(", report.graphs[1].after) == DECODE_LAYER
    assert re.findall(r"= specache\.(\w+)\(", report.graphs[1].runs) == ["layer_step"]
    assert report.graphs[1].runs in str(report)
    assert report.graphs[1].after in str(report)
    assert "float32[2, 2, 4, 1, 8]" in report.graphs[1].after  # lanes, batch, num_heads, 1, head_dim


def test_policies_are_seen_in_the_graph() -> None:
    options = {"policy": "kcache", "top_k": 4, "resident_layers": 1}
    report = specache_fx.explain(TinyDecoder(TinyConfig()), options=options, run=_run)
    assert "decode, 1 lane, 2 attentions rewritten" in str(report)
    assert "the first 1 of the layers that keep all tokens: whole on the device" in str(report)
    assert re.findall(r"= specache\.(\w+)\(", report.graphs[1].after)[:2] == ["quantized_attention", "append"]
    assert 'instead of "token"' not in str(report)


def test_a_transformers_model_is_driven_through_generate_and_left_as_it_was() -> None:
    model = build("llama", 1)
    input_ids = torch.arange(3, 20)[None]
    report = specache_fx.explain(
        torch.compile(model, backend="specache"), options={"lookahead": "token"}, input_ids=input_ids
    )
    assert "decode, 2 lanes, 1 attention rewritten" in str(report)
    assert "modeling_llama.py" in report.graphs[0].rewritten[0]
    names = [line.split(" = ")[0].strip() for line in report.graphs[1].before.splitlines()]
    # With torch 2.11 transformers repeats keys and values itself.
    assert (names[:2], names[-1]) == (["keys", "values"], "attn_output")
    assert (len(names) == 3) == (torch.__version__ >= "2.12")
    assert model._compiled_call_impl is None
    out = model.generate(input_ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(specache_fx.CacheHandleError, match=r"no KV cache of specache"):
        specache_fx.stats(out.past_key_values)


def test_attention_that_is_left_alone_has_its_line_and_the_remedy() -> None:
    model = build("llama", 1, attn_implementation="eager")
    form = {"use_cache": True, "output_attentions": True, "max_new_tokens": 1}
    text = str(specache_fx.explain(model, input_ids=torch.arange(3, 20)[None], **form))
    assert "0 attentions rewritten, 1 left alone" in text
    assert "modeling_llama.py" in text and "nn.functional.softmax" in text
    assert 'attn_implementation="sdpa"' in text and "output_attentions=False" in text
    assert model._compiled_call_impl is None


class _Cacheless(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.float().cumsum(-1)


class _OwnAttention(torch.nn.Module):
    """Attention by sigmoid over a cache, in two layers."""

    def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        new = []
        for past_keys, past_values in zip(past[::2], past[1::2], strict=True):
            keys, values = torch.cat([past_keys, x], 2), torch.cat([past_values, x], 2)
            weights = torch.sigmoid(x @ keys.mT)
            x = weights @ values
            new += [keys, values]
        return x, new


def test_bad_options_are_named_at_once() -> None:
    with pytest.raises(specache_fx.ConfigError, match="Did you mean 'bits'"):
        specache_fx.explain(build("llama"), options={"bit": 1}, input_ids=torch.arange(3, 20)[None])
    with pytest.raises(specache_fx.ConfigError, match=r"give it a model \(a torch.nn.Module\)"):
        specache_fx.compile(lambda x: x)  # type: ignore[type-var]


def test_a_model_without_a_cache_is_said_to_have_none() -> None:
    report = specache_fx.explain(_Cacheless(), input_ids=torch.arange(20)[None])
    assert "graph 0: no cache" in str(report) and "No graph takes or returns a KV cache" in str(report)


def test_layers_alike_are_one_message_with_the_line_to_change() -> None:
    past = [torch.randn(1, 2, 5, 8) for _ in range(4)]
    report = specache_fx.explain(_OwnAttention(), run=lambda model: model(torch.randn(1, 2, 1, 8), past))
    text = str(report)
    assert "graph 0: left alone, 0 attentions rewritten" in text
    assert re.search(r"test_explain\.py:\d+: weights = torch\.sigmoid\(x @ keys\.mT\)\) is left alone", text)
    assert re.search(r"test_explain\.py:\d+: x = weights @ values\) is left alone", text)
    assert text.count("is left alone:") == 2 and text.count("1 more like it.") == 2


class _Broken(TinyDecoder):
    """A graph break between embedding and layers: the second graph takes no token."""

    def embed_inputs(self, *args: object) -> object:
        out = super().embed_inputs(*args)  # type: ignore[arg-type]
        torch._dynamo.graph_break()
        return out


def test_a_graph_break_falls_back_to_query() -> None:
    report = specache_fx.explain(_Broken(TinyConfig(num_layers=1)), options={"lookahead": "token"}, run=_run)
    assert "1 lane," in str(report) and 'lookahead "query" instead of "token"' in str(report)


@pytest.fixture
def alone() -> Iterator[None]:
    """An operator that can't be batched."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("one at a time")

    library = torch.library.Library("explained", "DEF")
    library.define("alone(Tensor x) -> Tensor")
    library.impl("alone", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("explained::alone", torch.empty_like, lib=library)
    torch.library.register_vmap("explained::alone", refuse, lib=library)
    yield
    library._destroy()


class _Alone(TinyDecoder):
    def embed_inputs(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> object:
        hidden, rotary = super().embed_inputs(input_ids, position_ids)
        return torch.ops.explained.alone(hidden), rotary


@pytest.mark.usefixtures("alone")
def test_an_op_that_cannot_be_batched_falls_back_to_query(caplog: pytest.LogCaptureFixture) -> None:
    model = _Alone(TinyConfig(num_layers=1))
    plain = generate(model, torch.arange(60).view(2, 30) % 61, 12)
    options = {
        "bits": 16,
        "group_size": 4,
        "residual_length": 4,
        "top_k": 4,
        "lowering": "eager",
        "lookahead": "token",
    }
    compiled = torch.compile(model, backend="specache", options=options)
    with caplog.at_level(logging.WARNING, logger="specache_fx"):
        ours = generate(compiled, torch.arange(60).view(2, 30) % 61, 12)
    assert torch.equal(ours.tokens, plain.tokens)
    assert any("traced for two tokens at once" in record.message for record in caplog.records)
