"""Every supported transformers architecture: exactly eager's tokens, two graphs and no more, static decode shapes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import NAMES, TWO_LANES, build, left_padded
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers.generation.streamers import BaseStreamer

import specache_fx
from specache_fx.backend import Backend
from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.capture.program import Phase, Program

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NEW_TOKENS, FEW_TOKENS = 120, 24
SPELT_OUT = (
    "bloom",  # baddbmm with ALiBi on flattened heads
    "mpt",  # ALiBi, masked_fill
    "falcon",  # ALiBi in the mask of an SDPA
    "gptj",  # float32 products
    "codegen",  # scaled after the mask
    "xglm",  # bounded below
    "gemma2",  # softcap
    "gpt_oss",  # sinks
    "gpt_neo",  # two masks, one a buffer
)
# Attention that is no SDPA call: "eager" asks for it, others have no other.
DEEP = "gpt_oss deep"  # four layers: weights and sinks differ from layer to layer, and lanes are traced once
CASES = [*NAMES, *SPELT_OUT, DEEP, *(f"{name} eager" for name in ("llama", "qwen3", "phi3", "gpt2", "opt"))]
# Rotary and learned positions; each of the others has a spelling of its own, or a term that the rest lacks.
DAILY = {"llama", "gpt2", *SPELT_OUT, DEEP} - {"codegen", "xglm", "gpt_oss"}
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


def model(case: str) -> nn.Module:
    """Of one layer where attention is spelt out: Dynamo traces layer by layer."""
    name, _, attention = case.partition(" ")
    if case == DEEP:
        built = build(name, 4, layer_types=["full_attention"] * 4)
    else:
        built = build(name, 2 if case in NAMES else 1, attn_implementation=attention or None)
    generator = torch.Generator().manual_seed(1)
    for parameter, weight in built.named_parameters():
        if parameter.endswith("sinks"):
            weight.data.normal_(mean=1.0, generator=generator)
    return built


def generate(model: nn.Module, new_tokens: int, **kwargs: Any) -> Any:
    form = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**left_padded(), max_new_tokens=new_tokens, **form, **kwargs)


def watched(case: str, new_tokens: int, **options: Any) -> tuple[Any, Watch]:
    watch, made = Watch(), model(case)
    backend = partial(Backend(), options={**TWO_LANES, "strict": True, **options}, observe=watch.observe)
    made.compile(backend=backend)
    return generate(made, new_tokens, streamer=watch), watch


@cache
def eager(case: str) -> tuple[Tensor, Tensor]:
    """Tokens and their logits."""
    few = case == DEEP or case in SPELT_OUT
    out = generate(model(case), FEW_TOKENS if few else NEW_TOKENS)
    tokens = out.sequences[:, PROMPT_LEN:]
    # A model that repeats itself would prove little.
    assert len(tokens[:, :FEW_TOKENS].unique()) > 6 and (few or len(tokens.unique()) > 20)
    return tokens, torch.stack(out.logits)


def assert_equals_eager(case: str, new_tokens: int, **options: Any) -> tuple[Any, Watch]:
    out, watch = watched(case, new_tokens, **options)
    tokens, logits = eager(case)
    assert torch.equal(out.sequences[:, PROMPT_LEN:], tokens[:, :new_tokens])
    assert (torch.stack(out.logits) - logits[:new_tokens]).abs().max() <= 1e-4 * logits.abs().max()
    assert_nothing_is_compiled_late(watch)
    stats = specache_fx.stats(out.past_key_values)
    assert stats.steps == new_tokens - 1
    return stats, watch


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


@pytest.mark.parametrize("case", nightly_unless(DAILY.__contains__, CASES))
def test_tokens_equal_eager_with_bits_16(case: str) -> None:
    stats, watch = assert_equals_eager(case, NEW_TOKENS if case in NAMES else FEW_TOKENS, bits=16)
    # Lane 1 has what lane 0 will have: only the top-k, and so nothing of its token, depends on low bits.
    # Its biases, softcap and sinks are those of the token to come.
    assert stats.exact_hit_rate == 1.0
    (_, graph), *_ = watch.decode
    assert_static(graph)


@pytest.mark.parametrize("case", nightly_unless("gpt_oss".__eq__, [*NAMES, "bloom", "gemma2", "gpt_oss"]))
def test_tokens_equal_eager_with_every_pair_prefetched(case: str) -> None:
    # Fewer tokens than above: with all pairs staged a step costs several times as much.
    stats, _ = assert_equals_eager(case, 90 if case in NAMES else FEW_TOKENS, bits=1, top_k=128)
    assert stats.topk_hit_rate == 1.0 and stats.prefetched_rows > 0


@pytest.mark.parametrize("case", nightly_unless("plain".__eq__, ["llama", "opt", "mixtral", "plain"]))
def test_low_bits_change_the_tokens(case: str) -> None:
    """The two tests above can fail: where pairs are missing at 16 bits, the tokens are others."""
    out, _ = watched(case, 60, bits=1, top_k=1)
    assert not torch.equal(out.sequences[:, PROMPT_LEN:], eager(case)[0][:, :60])


@pytest.mark.parametrize(
    ("case", "lookahead"),
    nightly_unless(
        ("bloom", "query").__eq__,
        itertools.product(["llama", "gpt2", "bloom", "gpt_oss"], ["query", "none"]),
    ),
)
def test_other_lookaheads_equal_eager(case: str, lookahead: str) -> None:
    assert_equals_eager(case, 60 if case in NAMES else FEW_TOKENS, bits=1, top_k=128, lookahead=lookahead)


def test_a_turn_longer_than_its_past_equals_eager() -> None:
    """Dynamo leaves lengths that are equal open then: those of keys, values and mask are other symbols."""
    decoder, plain = model("gemma2"), model("gemma2")
    specache_fx.compile(decoder, bits=16, lowering="eager")
    ids = torch.randint(1, 128, (2, 26), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        past = decoder(ids[:, :10], use_cache=True).past_key_values
        turn = decoder(ids[:, 10:], past_key_values=past, use_cache=True).logits
        torch.testing.assert_close(turn, plain(ids).logits[:, 10:], atol=1e-5, rtol=1e-5)


OTHER_DTYPES = nightly_unless(lambda dtype: dtype == torch.bfloat16, [torch.bfloat16, torch.float16])


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), *OTHER_DTYPES], ids=str
)
@pytest.mark.parametrize("policy", nightly_unless("specache".__eq__, ["specache", "kivi"]))
def test_low_bits_run_in_every_dtype(dtype: torch.dtype, policy: str) -> None:
    decoder = build("plain", 1).to(dtype)
    expected = generate(decoder, 2)
    decoder.compile(backend="specache", options={**TWO_LANES, "bits": 2, "policy": policy})
    out = generate(decoder, 60)
    assert all(logits.isfinite().all() for logits in out.logits)
    for found, wanted in zip(out.logits, expected.logits, strict=False):  # all pairs are in the window yet
        assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert specache_fx.stats(out.past_key_values).steps == 59


@pytest.mark.parametrize(
    ("name", "differ"),
    [
        ("plain", [{"head_dim": size, "layers": 1} for size in (16, 32)]),
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
        decoder = build(name, **overrides)
        expected = generate(decoder, 12).sequences
        decoder.compile(backend="specache", options={**TWO_LANES, "bits": 16, "strict": True})
        out = generate(decoder, 12)
        assert torch.equal(out.sequences, expected)
        assert specache_fx.stats(out.past_key_values).exact_hit_rate == 1.0


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_dynamic_true_changes_nothing(case: str) -> None:
    decoder = model(case)
    decoder.compile(backend="specache", dynamic=True, options={**TWO_LANES, "bits": 16, "strict": True})
    out = generate(decoder, 30)
    assert torch.equal(out.sequences[:, PROMPT_LEN:], eager(case)[0][:, :30])
    assert specache_fx.stats(out.past_key_values).exact_hit_rate == 1.0


def test_layers_whose_lanes_are_traced_once_equal_eager() -> None:
    """Weights and expansions of latents differ from layer to layer."""
    made, watch = build("deepseek_v3", 4), Watch()
    expected = generate(made, FEW_TOKENS)
    made.compile(
        backend=partial(Backend(), options={**TWO_LANES, "bits": 16, "strict": True}, observe=watch.observe)
    )
    found = generate(made, FEW_TOKENS)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert watch.decode
