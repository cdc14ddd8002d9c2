"""Models that Dynamo can't take in one graph: each piece is rewritten on its own, or left alone with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.hooked import Hooked, logits
from support.models import Block, TinyConfig, TinyDecoder, generate
from support.own_modules import OwnConfig, OwnDecoder, SwiGLU, greedy
from support.zoo import TWO_LANES, build, left_padded
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel, ViTConfig, ViTModel

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {**TWO_LANES, "bits": 1, "top_k": 64}
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
    assert "and this piece takes no token ids" in warning and names_the_break(warning)


def names_the_break(warning: str) -> bool:
    told = "torch._dynamo.graph_break() breaks the graph (Call to `torch._dynamo.graph_break()`"
    return "test_graph_breaks.py:" in warning and told in warning and "Take that out of the" in warning


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
    assert "its keys come into the graph whole" in warning and "support/models.py" in warning
    assert names_the_break(warning)


class BreaksBehindAppends(Hooked):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().attend(layer, q, k, v, hide)


def test_appends_whose_attention_is_in_another_graph_warn(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(BreaksBehindAppends(), backend="specache", options=OPTIONS)
    with caplog.at_level("WARNING", logger="specache_fx"):
        torch.testing.assert_close(logits(compiled), logits(BreaksBehindAppends()))
    assert all(map(names_the_break, warnings_of(caplog)))
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


def test_a_step_whose_graph_breaks_between_layers_is_an_error() -> None:
    compiled = torch.compile(BreaksInSteps(), backend="specache", options=OPTIONS)
    with pytest.raises(specache_fx.CacheHandleError, match="reads 1 of the 2 layers"):
        logits(compiled)


# Frames that run uncompiled -----------------------------------------------------------------------------------------


class InOneLoop(nn.Module):
    """All layers in one `forward`: behind a break in the loop Dynamo gives the whole frame up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hooked()

    def between(self, x: Tensor) -> Any:
        """In each layer."""

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        start = 0 if past is None else past[0][0].shape[2]
        x, new = self.inner.embed(ids) + self.inner.positions(ids, start), []
        for layer in range(2):
            q, k, v = (
                side.unflatten(-1, (2, 16)).transpose(1, 2) for side in self.inner.qkv[0](x).chunk(3, -1)
            )
            if past is not None:
                k, v = torch.cat([past[layer][0], k], 2), torch.cat([past[layer][1], v], 2)
            self.between(x)
            x = x + sdpa(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2).flatten(2)
            new.append((k, v))
        return self.inner.head(x), new


class Breaks(InOneLoop):
    def between(self, x: Tensor) -> Any:
        torch._dynamo.graph_break()


class AsksForANumber(InOneLoop):
    def between(self, x: Tensor) -> Any:
        return x.abs().max().item()


class Branches(InOneLoop):
    def between(self, x: Tensor) -> Any:
        if x.abs().max() > 1e9:
            raise OverflowError


class Tries(InOneLoop):
    def between(self, x: Tensor) -> Any:
        try:
            torch._dynamo.graph_break()
        except OSError:
            return None


class BreaksForLongPrompts(InOneLoop):
    def between(self, x: Tensor) -> Any:
        if x.shape[1] > 12:
            torch._dynamo.graph_break()


class SpeltOutAndBreaks(Breaks):
    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x, new = self.inner.embed(ids), []
        for layer in range(2):
            q, k, v = (
                side.unflatten(-1, (2, 16)).transpose(1, 2) for side in self.inner.qkv[0](x).chunk(3, -1)
            )
            if past is not None:
                k, v = torch.cat([past[layer][0], k], 2), torch.cat([past[layer][1], v], 2)
            self.between(x)
            x = x + (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
            new.append((k, v))
        return self.inner.head(x), new


class AtATensor(nn.Module):
    """Buffers are written at a slice whose start is a tensor: Python needs its number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hooked()
        self.kept = [(torch.zeros(2, 2, 64, 16), torch.zeros(2, 2, 64, 16)) for _ in range(2)]
        self.count = torch.zeros(1, dtype=torch.int64)

    def write(self, buffer: Tensor, start: Tensor, new: Tensor) -> None:
        buffer[:, :, start : start + new.shape[2]] = new

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        place = self.count + torch.arange(ids.shape[1])
        x = self.inner.embed(ids)
        mask = torch.arange(64)[None] <= place[:, None]
        for layer in range(2):
            q, k, v = (
                side.unflatten(-1, (2, 16)).transpose(1, 2) for side in self.inner.qkv[0](x).chunk(3, -1)
            )
            for buffer, new in zip(self.kept[layer], (k, v), strict=True):
                self.write(buffer, self.count[0], new)
            x = x + sdpa(q, *self.kept[layer], attn_mask=mask).transpose(1, 2).flatten(2)
        self.count += ids.shape[1]
        return self.inner.head(x), None


class AsTheRemedySays(AtATensor):
    def write(self, buffer: Tensor, start: Tensor, new: Tensor) -> None:
        buffer.index_copy_(2, start + torch.arange(new.shape[2]), new)


UNCOMPILED: dict[type[nn.Module], str] = {
    Breaks: "torch._dynamo.graph_break() breaks the graph (Call to",
    AsksForANumber: "return x.abs().max().item() breaks the graph (Unsupported Tensor.item() call",
    Branches: "if x.abs().max() > 1e9: breaks the graph (Data-dependent branching",
    Tries: "torch._dynamo.graph_break() breaks the graph (Call to",
    SpeltOutAndBreaks: "torch._dynamo.graph_break() breaks the graph (Call to",
    AtATensor: "buffer[:, :, start : start + new.shape[2]] = new breaks the graph (Unsupported Tensor.item() call",
}


@pytest.mark.parametrize("kind", UNCOMPILED)
def test_attention_that_runs_uncompiled_warns_once_and_is_an_error_if_strict(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    compiled = torch.compile(kind(), backend="specache", options=OPTIONS)
    with caplog.at_level("WARNING", logger="specache_fx"):
        assert torch.equal(logits(compiled), logits(kind()))
    (warning,) = warnings_of(caplog)
    assert "runs uncompiled from now on, its attention too" in warning and UNCOMPILED[kind] in warning
    assert ("index_copy_" in warning) is (kind in (AtATensor, AsksForANumber))
    torch._dynamo.reset()
    with pytest.raises((specache_fx.UnsupportedGraphError, BackendCompilerFailed), match="runs uncompiled"):
        logits(torch.compile(kind(), backend="specache", options={**OPTIONS, "strict": True}))
    report = str(specache_fx.explain(kind(), options=OPTIONS, run=logits))
    assert UNCOMPILED[kind] in report and "runs uncompiled" in report


def test_the_remedy_for_a_position_that_is_a_tensor_works(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(AsTheRemedySays(), backend="specache", options={**OPTIONS, "strict": True})
    torch.testing.assert_close(logits(compiled), logits(AsTheRemedySays()), rtol=1e-3, atol=1e-3)
    assert specache_fx.stats(compiled.kept).steps == 10


@torch.no_grad()
def test_a_model_that_was_rewritten_and_no_longer_is_says_so(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(BreaksForLongPrompts(), backend="specache", options=OPTIONS)
    logits(compiled)
    with caplog.at_level("WARNING", logger="specache_fx"):
        _, past = compiled(torch.ones(1, 9, dtype=torch.int64))
        assert specache_fx.stats(past).kv_len == 9 and not caplog.records
        compiled(torch.ones(1, 13, dtype=torch.int64))
        compiled(torch.ones(1, 14, dtype=torch.int64))
    (warning,) = warnings_of(caplog)
    assert "Attention in it was rewritten before, and no longer is" in warning and "graph_break()" in warning
    torch._dynamo.reset()
    compiled = torch.compile(BreaksForLongPrompts(), backend="specache", options={**OPTIONS, "strict": True})
    logits(compiled)
    with pytest.raises(specache_fx.UnsupportedGraphError, match="was rewritten before"):
        compiled(torch.ones(1, 13, dtype=torch.int64))


class Encodes(nn.Module):
    """No cache: neither a break nor an uncompiled attention is of interest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hooked()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner.embed(ids)
        for _ in range(2):
            q, k, v = (
                side.unflatten(-1, (2, 16)).transpose(1, 2) for side in self.inner.qkv[0](x).chunk(3, -1)
            )
            torch._dynamo.graph_break()
            x = x + sdpa(q, k, v).transpose(1, 2).flatten(2)
        return self.inner.head(x)


@torch.no_grad()
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    "name", nightly_unless(("own", "llama").__contains__, ["own", "bert", "t5", "llama", "vit"])
)
def test_models_without_a_cache_are_quiet(name: str, breaks: bool, caplog: pytest.LogCaptureFixture) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model: Any = {
        "own": Encodes,
        "bert": lambda: BertModel(BertConfig(**shape, vocab_size=61)),
        "t5": lambda: T5EncoderModel(
            T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
        "llama": lambda: build("llama", 2),
        "vit": lambda: ViTModel(ViTConfig(**shape, image_size=32, patch_size=8)),
    }[name]()
    if breaks:
        for part in [part for part in model.modules() if type(part).__name__.endswith("Attention")]:
            part.register_forward_hook(break_after)
    model.eval().compile(backend="specache", options={**OPTIONS, "strict": True})
    kwargs = {"use_cache": False} if name == "llama" else {}
    with caplog.at_level("WARNING", logger="specache_fx"):
        for length in (9, 12):
            model(
                torch.ones(1, 3, 32, 32) if name == "vit" else torch.ones(2, length, dtype=torch.int64),
                **kwargs,
            )
    assert warnings_of(caplog) == []
