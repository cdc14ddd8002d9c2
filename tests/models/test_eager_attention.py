"""Models whose attention is no SDPA call: exactly eager's tokens and logits, in both lanes."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import SMALL, build, left_padded
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NEW_TOKENS = 24
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
EAGER = ("llama", "qwen3", "phi3", "gpt2", "opt")
CASES = [(name, None) for name in SPELT_OUT] + [(name, "eager") for name in EAGER]
# Each of these has a spelling of its own, or a term that the others lack.
KINDS = ("bloom", "mpt", "falcon", "gptj", "gemma2", "gpt_oss", "gpt_neo", "gpt2")
over_cases = pytest.mark.parametrize(
    ("name", "attention"),
    nightly_unless(lambda case: case[0] in KINDS, CASES),
    ids=lambda value: value or "own",
)


def model(name: str, attention: str | None) -> nn.Module:
    # Of one layer: Dynamo traces layer by layer.
    built = build(name, 1, **({} if attention is None else {"attn_implementation": attention}))
    for parameter, weight in built.named_parameters():
        if parameter.endswith("sinks"):
            weight.data.normal_(mean=1.0, generator=torch.Generator().manual_seed(1))
    return built


def generate(decoder: nn.Module) -> tuple[Tensor, Tensor, Any]:
    out = decoder.generate(
        **left_padded((5, 12)),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits), out.past_key_values


@cache
def plain(name: str, attention: str | None) -> tuple[Tensor, Tensor]:
    tokens, logits, _ = generate(model(name, attention))
    assert len(tokens[:, -NEW_TOKENS:].unique()) > 6  # a model that repeats itself would prove little
    return tokens, logits


def assert_equal(name: str, attention: str | None, **options: Any) -> Any:
    decoder = model(name, attention)
    decoder.compile(backend="specache", options={**SMALL, "strict": True, **options})
    tokens, logits, past = generate(decoder)
    expected_tokens, expected = plain(name, attention)
    assert torch.equal(tokens, expected_tokens)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    stats = specache_fx.stats(past)
    assert stats.steps == NEW_TOKENS - 1
    return stats


@over_cases
def test_tokens_equal_eager_with_bits_16(name: str, attention: str | None) -> None:
    # Lane 1 guesses every token: its biases, softcap and sinks are those of the token to come.
    assert assert_equal(name, attention, bits=16).exact_hit_rate == 1.0


@pytest.mark.parametrize("name", nightly_unless("gpt_oss".__eq__, ["bloom", "gemma2", "gpt_oss"]))
def test_tokens_equal_eager_with_every_pair_prefetched(name: str) -> None:
    stats = assert_equal(name, None, bits=1, top_k=64)
    assert stats.topk_hit_rate == 1.0 and stats.prefetched_rows > 0


@pytest.mark.parametrize(
    ("name", "lookahead"),
    nightly_unless(
        lambda case: case in (("bloom", "query"), ("gpt_oss", "none")),
        itertools.product(["bloom", "gpt_oss"], ["query", "none"]),
    ),
)
def test_other_lookaheads_equal_eager(name: str, lookahead: str) -> None:
    assert_equal(name, None, bits=1, top_k=64, lookahead=lookahead)


def test_a_turn_longer_than_its_past_equals_eager() -> None:
    """Dynamo leaves lengths that are equal open then: those of keys, values and mask are other symbols."""
    decoder, plain = model("gemma2", None), model("gemma2", None)
    specache_fx.compile(decoder, bits=16, lowering="eager")
    ids = torch.randint(1, 128, (2, 26), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        past = decoder(ids[:, :10], use_cache=True).past_key_values
        turn = decoder(ids[:, 10:], past_key_values=past, use_cache=True).logits
        torch.testing.assert_close(turn, plain(ids).logits[:, 10:], atol=1e-5, rtol=1e-5)


@pytest.mark.nightly
def test_inductor_equals_eager() -> None:
    assert_equal("gpt_oss", None, bits=16, lowering="inductor")


@pytest.mark.parametrize(
    "dtype", nightly_unless(lambda dtype: dtype == torch.bfloat16, [torch.bfloat16, torch.float16]), ids=str
)
@pytest.mark.parametrize(
    "name", nightly_unless(lambda name: name == "gpt_oss", ["llama", "bloom", "codegen", "gpt_oss"])
)
def test_spelt_out_attention_runs_in_16_bits(name: str, dtype: torch.dtype) -> None:
    decoder = model(name, "eager" if name == "llama" else None).to(dtype)
    expected = generate(decoder)[1]
    torch._dynamo.reset()
    decoder.compile(backend="specache", options={**SMALL, "strict": True, "bits": 16})
    logits = generate(decoder)[1]
    # The first tokens: later ones differ where rounding decides between two.
    assert (logits[:2] - expected[:2]).abs().max() <= 0.05 * expected.abs().max()


def test_probabilities_that_are_asked_for_are_refused() -> None:
    decoder = model("llama", "eager")
    decoder.compile(backend="specache", options={**SMALL, "strict": True})
    with pytest.raises(BackendCompilerFailed, match="output_attentions=False"), torch.no_grad():
        decoder(**left_padded((5, 12)), use_cache=True, output_attentions=True)
