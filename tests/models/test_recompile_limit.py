"""Dynamo never gives a compiled model up: past its recompile limit a model would run uncompiled, on handles."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.threads import at_once
from support.zoo import SMALL, VOCAB_SIZE, build, left_padded
from torch import Tensor, nn
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

import specache_fx
from specache_fx import UnsupportedGraphError
from specache_fx.dynamo import graph_breaks

LIMITS = ("recompile_limit", "accumulated_recompile_limit")
OPTIONS = {**SMALL, "bits": 16}
config: Any = torch._dynamo.config


@pytest.fixture(autouse=True)
def limits(fresh_dynamo: None) -> Iterator[None]:
    """Put Dynamo's limits back, those of other threads too."""
    saved = [(getattr(config, name), config._config[name].default) for name in LIMITS]
    torch.compiler.reset()  # warnings are said once
    yield
    for name, (value, default) in zip(LIMITS, saved, strict=True):
        setattr(config, name, value)
        config._config[name].default = default


def prompts(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Batches of one and two, as tokens, as padded tokens, as embeddings, as tokens after a prompt of one token."""
    for batch in range(1, 3):
        lengths = tuple(range(4, 4 + batch))
        padded = left_padded(lengths, seed=batch)
        ids = torch.randint(3, VOCAB_SIZE, (batch, 7 + batch), generator=torch.Generator().manual_seed(batch))
        yield {"input_ids": ids}
        yield padded
        yield {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
        yield {"input_ids": ids[:, :1]}


def generate(model: nn.Module, prompt: dict[str, Tensor]) -> Any:
    return model.generate(
        **prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


@torch.no_grad()
def second_turn(model: nn.Module, prompt: dict[str, Tensor], past: Any) -> Tensor:
    """Three tokens more: of all calls the likeliest to meet a limit with a cache of handles in hand."""
    batch, kv_len = past.layers[0].keys.shape[0], past.get_seq_length()
    more = {"input_ids": torch.full((batch, 3), 9)}
    if "attention_mask" in prompt:
        mask = prompt["attention_mask"]
        more["attention_mask"] = nn.functional.pad(mask, (0, kv_len + 3 - mask.shape[1]), value=1)
    return model(**more, past_key_values=past, use_cache=True).logits


def assert_as_eager(model: nn.Module, plain: nn.Module, prompt: dict[str, Tensor]) -> None:
    ours, expected = generate(model, prompt), generate(plain, prompt)
    assert not any(logits.isnan().any() for logits in ours.logits)
    assert torch.equal(ours.sequences, expected.sequences)
    assert specache_fx.stats(ours.past_key_values).steps == 11  # compiled, to the last step
    answers = [
        second_turn(net, prompt, out.past_key_values) for net, out in ((model, ours), (plain, expected))
    ]
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def compiled(name: str = "plain", **how: Any) -> nn.Module:
    model = build(name, 1)
    model.compile(backend="specache", options=OPTIONS, **how)
    return model


@pytest.mark.nightly
def test_generating_in_many_ways_equals_eager() -> None:
    config.recompile_limit = 3
    plain, model = build("plain", 1), compiled()
    for prompt in prompts(plain):
        assert_as_eager(model, plain, prompt)
    assert config.recompile_limit == 3


@torch.no_grad()
def test_graphs_that_are_left_alone_leave_room() -> None:
    config.recompile_limit = 2
    plain, model = build("plain", 1), compiled()
    ids = torch.arange(3, 11)[None]
    out = model(ids, use_cache=True)
    for batch in (1, 2):
        model(ids.expand(batch, -1), use_cache=False)  # no cache
        with torch.enable_grad():
            model(ids.expand(batch, -1), use_cache=False)
    expected = plain(ids, use_cache=True)
    for token in (torch.tensor([[5, 6, 7]]), torch.tensor([[5]])):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        expected = plain(token, past_key_values=expected.past_key_values, use_cache=True)
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert specache_fx.stats(out.past_key_values).steps == 1


class Counter(nn.Module):
    """Counts its calls in an int, which Dynamo takes for a constant."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@torch.no_grad()
def test_the_limit_holds_until_a_graph_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_breaks, "_attentions", set())
    config.recompile_limit = 2
    counter, traces = Counter(), FRAME_COMPILE_COUNTER.copy()
    counter.compile(backend="specache", options=OPTIONS)
    for i in range(1, 7):
        assert counter(torch.ones(2)).tolist() == [i, i]
    assert sum((FRAME_COMPILE_COUNTER - traces).values()) <= 3
    model = compiled()
    for batch in (1, 2, 3):
        for length in (1, 8):  # sizes of one are constants: a graph each
            out = model(torch.arange(3, 3 + length).expand(batch, -1), use_cache=True)
            assert specache_fx.stats(out.past_key_values).kv_len == length


@pytest.mark.nightly
@torch.no_grad()
def test_compiles_of_the_same_code_by_another_backend_find_room() -> None:
    """No backend of ours is asked there: the last that the limit allows may be one of these."""
    config.recompile_limit = 4
    plain, model, other = build("llama", 1), compiled("llama"), build("llama", 1)
    other.compile(backend="eager")
    ids = torch.arange(3, 11)[None]
    assert_as_eager(model, plain, {"input_ids": ids})
    for way in (
        {"use_cache": False},
        {"use_cache": True},
        {"output_hidden_states": True},
        {"return_dict": False},
    ):
        other(ids, **way)
    assert_as_eager(
        model, plain, {"input_ids": ids.expand(3, -1), "attention_mask": torch.ones_like(ids).expand(3, -1)}
    )


def test_the_limit_holds_for_a_thread_for_each_request() -> None:
    """What a thread sets in Dynamo's config is that thread's alone, compiled versions are everyone's."""
    config._config["recompile_limit"].default = 3  # a new thread knows nothing of what this one has set
    plain, model = build("plain", 1), compiled()
    for prompt in list(prompts(plain))[:3]:
        at_once([partial(assert_as_eager, model, plain, prompt)])


@pytest.mark.nightly
@torch.no_grad()
def test_a_limit_of_the_region_is_an_error() -> None:
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        assert not torch.__version__.startswith(("2.12", "2.13"))
        with pytest.raises(TypeError, match="recompile_limit"):  # torch 2.11: nobody can have set one
            compiled(recompile_limit=2)
        return
    model = compiled(recompile_limit=2, isolate_recompiles=True)
    first, padded = list(prompts(model))[:2]
    generate(model, first)
    with pytest.raises(UnsupportedGraphError, match=r"torch\.compile\(recompile_limit="):
        generate(model, padded)


@pytest.mark.nightly
def test_the_accumulated_limit_is_an_error_until_dynamo_is_reset() -> None:
    plain, model = build("plain", 1), compiled()
    first, padded, *others = list(prompts(plain))[:4]
    assert_as_eager(model, plain, first)
    config.accumulated_recompile_limit = max(FRAME_COMPILE_COUNTER.values())
    for prompt in others:  # the limit holds
        with pytest.raises(UnsupportedGraphError, match=r"TORCH_LOGS=recompiles") as caught:
            generate(model, prompt)
        assert "torch._dynamo.reset()" in str(caught.value)
    assert_as_eager(model, plain, first)  # what was compiled still runs
    torch._dynamo.reset()
    assert_as_eager(model, plain, padded)
