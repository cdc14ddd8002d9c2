"""Every supported transformers architecture: exactly eager's tokens, two graphs and no more, static decode shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import NAMES, SMALL, build, left_padded
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers.generation.streamers import BaseStreamer

import specache_fx
from specache_fx.backend import Backend
from specache_fx.capture.graph_utils import placeholders
from specache_fx.capture.program import Phase, Program

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NEW_TOKENS = 120
_, PROMPT_LEN = left_padded()["input_ids"].shape


@dataclass
class Watch(BaseStreamer):
    """A streamer that counts the tokens, and notes after how many of them a graph was compiled."""

    num_tokens: int = -1  # the prompt is streamed first
    captured: list[tuple[int, Program]] = field(default_factory=list)  # Dynamo's graphs
    decode: list[tuple[int, GraphModule]] = field(default_factory=list)  # what decode steps run

    def put(self, value: Tensor) -> None:
        self.num_tokens += 1

    def end(self) -> None:
        pass

    def observe(self, name: str, gm: GraphModule, program: Program) -> None:
        if name == "analyse":
            self.captured.append((self.num_tokens, program))
        elif name == "verify":
            self.decode.append((self.num_tokens, gm))


def generate(model: nn.Module, new_tokens: int, **kwargs: Any) -> Any:
    return model.generate(
        **left_padded(), max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, **kwargs
    )


def watched(name: str, new_tokens: int, **options: Any) -> tuple[Any, Watch]:
    watch, model = Watch(), build(name)
    model.compile(backend=partial(Backend(), options={**SMALL, **options}, observe=watch.observe))
    return generate(model, new_tokens, streamer=watch), watch


@cache
def eager_tokens(name: str) -> Tensor:
    tokens = generate(build(name), NEW_TOKENS).sequences
    assert len(tokens[:, -NEW_TOKENS:].unique()) > 20  # a model that repeats itself would prove little
    return tokens


def assert_nothing_is_compiled_late(watch: Watch) -> None:
    """After the third decode step, that is the fourth token, no graph is made."""
    assert max(after for after, _ in watch.captured) <= 3
    assert max(after for after, _ in watch.decode) <= 3
    phases = [program.phase for _, program in watch.captured]
    assert phases.count(Phase.PREFILL) == 1 and set(phases) == {Phase.PREFILL, Phase.DECODE}


def assert_static(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            assert not isinstance(leaf, torch.SymInt), node.format_node()
            if isinstance(leaf, Tensor):
                assert all(isinstance(size, int) for size in leaf.shape), node.format_node()
    for node in placeholders(gm.graph):  # nor was a length that is about to grow made a constant
        assert not {PROMPT_LEN, PROMPT_LEN + 1} & set(node.meta["val"].shape), node.name


# Rotary and learned positions; `make test-all` has the others, `test_eager_attention.py` one of experts by day.
_KINDS = {"llama", "gpt2"}
_BY_KIND = [pytest.param(name, marks=[] if name in _KINDS else pytest.mark.nightly) for name in NAMES]


@pytest.mark.parametrize("name", _BY_KIND)
def test_tokens_equal_eager_with_bits_16(name: str) -> None:
    out, watch = watched(name, NEW_TOKENS, bits=16)
    assert torch.equal(out.sequences, eager_tokens(name))
    stats = specache_fx.stats(out.past_key_values)
    assert stats.steps == NEW_TOKENS - 1
    # Lane 1 has what lane 0 will have: only the top-k, and so nothing of its token, depends on low bits.
    assert stats.exact_hit_rate == 1.0
    assert_nothing_is_compiled_late(watch)
    (_, graph), *_ = watch.decode
    assert_static(graph)


@pytest.mark.parametrize("name", nightly_unless("gpt2".__eq__, NAMES))
def test_tokens_equal_eager_with_every_pair_prefetched(name: str) -> None:
    # Fewer tokens than above: with all pairs staged a step costs several times as much.
    new_tokens = 90
    out, watch = watched(name, new_tokens, bits=1, top_k=128)
    assert torch.equal(out.sequences, eager_tokens(name)[:, : PROMPT_LEN + new_tokens])
    stats = specache_fx.stats(out.past_key_values)
    assert stats.topk_hit_rate == 1.0 and stats.prefetched_rows > 0
    assert_nothing_is_compiled_late(watch)


@pytest.mark.parametrize("name", nightly_unless("llama".__eq__, ["llama", "opt", "mixtral"]))
def test_low_bits_change_the_tokens(name: str) -> None:
    """The two tests above can fail: where pairs are missing at 16 bits, the tokens are others."""
    out, _ = watched(name, 60, bits=1, top_k=1)
    assert not torch.equal(out.sequences, eager_tokens(name)[:, : PROMPT_LEN + 60])


@pytest.mark.parametrize("lookahead", nightly_unless("query".__eq__, ["query", "none"]))
@pytest.mark.parametrize("name", nightly_unless("gpt2".__eq__, ["llama", "gpt2"]))
def test_other_lookaheads_equal_eager(name: str, lookahead: str) -> None:
    out, watch = watched(name, 60, bits=1, top_k=128, lookahead=lookahead)
    assert torch.equal(out.sequences, eager_tokens(name)[:, : PROMPT_LEN + 60])
    assert_nothing_is_compiled_late(watch)


@pytest.mark.parametrize(
    "dtype",
    nightly_unless(lambda dtype: dtype == torch.bfloat16, [torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
@pytest.mark.parametrize("policy", nightly_unless(lambda policy: policy == "specache", ["specache", "kivi"]))
def test_low_bits_run_in_every_dtype(dtype: torch.dtype, policy: str) -> None:
    model = build("llama", 1).to(dtype)
    model.compile(backend="specache", options={**SMALL, "bits": 2, "policy": policy})
    out = generate(model, 60, output_logits=True)
    assert all(logits.isfinite().all() for logits in out.logits)
    assert specache_fx.stats(out.past_key_values).steps == 59


@pytest.mark.parametrize(
    ("name", "differ"),
    [
        ("llama", [{"head_dim": 16, "layers": 1}, {"head_dim": 32, "layers": 1}]),
        pytest.param(
            "llama",
            [{"head_dim": size, "attn_implementation": "eager"} for size in (16, 32)],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "gemma2", [{"attn_logit_softcapping": cap} for cap in (0.5, 2.0)], marks=pytest.mark.nightly
        ),
    ],
    ids=["head_dim", "head_dim spelt out", "softcap"],
)
def test_models_of_one_class_that_differ_in_a_number_are_rewritten(
    name: str, differ: list[dict[str, Any]]
) -> None:
    """Dynamo traces one code for all of them, and makes symbols of what it has seen differ."""
    for overrides in differ:
        model = build(name, **overrides)
        expected = generate(model, 12).sequences
        model.compile(backend="specache", options={**SMALL, "bits": 16, "strict": True})
        out = generate(model, 12)
        assert torch.equal(out.sequences, expected)
        assert specache_fx.stats(out.past_key_values).exact_hit_rate == 1.0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_dynamic_true_changes_nothing(name: str) -> None:
    model = build(name)
    model.compile(backend="specache", dynamic=True, options={**SMALL, "bits": 16, "strict": True})
    out = generate(model, 30)
    assert torch.equal(out.sequences, eager_tokens(name)[:, : PROMPT_LEN + 30])
    assert specache_fx.stats(out.past_key_values).exact_hit_rate == 1.0


@pytest.mark.nightly
def test_inductor_equals_eager() -> None:
    """The graphs compiled for real; by day `test_layer_parts.py` does."""
    out, watch = watched("llama", 60, bits=16, lowering="inductor")
    assert torch.equal(out.sequences, eager_tokens("llama")[:, : PROMPT_LEN + 60])
    assert_nothing_is_compiled_late(watch)
