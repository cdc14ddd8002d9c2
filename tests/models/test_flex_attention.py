"""`flex_attention`: rewritten as SDPA or spelt-out attention, or left alone by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fixed_modules
from support.cases import nightly_unless
from support.flex_modules import (
    Alibi,
    BlocksAlone,
    Causal,
    Documents,
    MadeBlocks,
    OtherKeysByHead,
    ReadsItsSums,
    Sine,
    Softcap,
    SumOfRow,
    Window,
    decoder,
    one_block,
)
from support.own_modules import VOCAB_SIZE, Run, greedy
from support.zoo import SMALL, TWO_LANES, build, left_padded
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as FLEX
from torch.fx import GraphModule
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import flex_attention

import specache_fx
from specache_fx.backend import Backend
from specache_fx.capture.program import Phase, Program

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OPTIONS = TWO_LANES | {"bits": 16}


@pytest.fixture(autouse=True)
def uncompiled_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of graphs `flex_attention` would compile itself in each step."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def equal(kinds: tuple[type[Causal], ...], padded: bool, num_tokens: int, **options: Any) -> Run:
    ours = torch.compile(decoder(*kinds), backend="specache", options={**OPTIONS, **options})
    plain, found = greedy(decoder(*kinds), padded, num_tokens), greedy(ours, padded, num_tokens)
    assert torch.equal(found.tokens, plain.tokens)
    torch.testing.assert_close(found.logits, plain.logits, rtol=1e-4, atol=1e-4)
    return found


CASES = [((Causal, Alibi), True), ((Window,), True), ((Softcap,), True)]
CASES += [((MadeBlocks,), False), ((Documents,), False), ((Alibi,), False), ((SumOfRow,), False)]


@pytest.mark.parametrize(("kinds", "padded"), nightly_unless(((Causal, Alibi), True).__eq__, CASES))
def test_is_rewritten_in_both_lanes(kinds: tuple[type[Causal], ...], padded: bool) -> None:
    stats = specache_fx.stats(equal(kinds, padded, 30, strict=True).cache)
    assert (stats.steps, stats.exact_hit_rate) == (29, 1.0)
    assert stats.prefetched_rows > 0


LENGTHS_IN_MEMORY = {
    Sine: "its form is not one that specache knows: `sin_default` (sin, flex_modules.py",
    OtherKeysByHead: "may hide other keys from head to head",
    BlocksAlone: "its block mask has no mask_mod",
    ReadsItsSums: "its log-sum-exp or its largest scores are read",
}


def test_is_left_alone_by_name(caplog: pytest.LogCaptureFixture) -> None:
    equal(tuple(LENGTHS_IN_MEMORY), False, 1)
    for told in LENGTHS_IN_MEMORY.values():
        assert told in caplog.text
    assert caplog.text.count("torch.nn.functional.scaled_dot_product_attention") >= 3


@torch.no_grad()
@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ((Window,), [0, 0, 0]),
        ((Softcap,), [1, 0, 1]),
        pytest.param((Window, Sine), [1, 1, 1], marks=pytest.mark.nightly),
    ],  # prompt, step, further turn
)
def test_graphs_keep_the_operator_where_it_is_not_replaced(
    kinds: tuple[type[Causal], ...], kept: list[int]
) -> None:
    operators: dict[Phase, int] = {}

    def observe(name: str, gm: GraphModule, program: Program) -> None:
        if name == "bind_cache":
            operators[program.phase] = sum(node.target is FLEX for node in gm.graph.nodes)

    def run(model: Callable[..., Any]) -> Tensor:
        ids = torch.randint(VOCAB_SIZE, (2, 22), generator=torch.Generator().manual_seed(1))
        found, cache = [], []
        for part in ids.split([13, 1, 7, 1], 1):
            logits, *cache = model(part, None, *cache)
            found.append(logits)
        return torch.cat(found, 1)

    ours: Any = torch.compile(decoder(*kinds), backend=partial(Backend(), observe=observe), options=OPTIONS)
    torch.testing.assert_close(run(ours), run(decoder(*kinds)), rtol=1e-4, atol=1e-4)
    assert list(operators.values()) == kept


def test_a_cache_of_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, is_causal: bool) -> Tensor:
        offset = attn_mask[0, 0, 0].sum() - 1  # of the buffer's rows, as gpt-fast has it
        return flex_attention(q, k, v, block_mask=one_block(q, k, lambda b, h, i, j: i + offset >= j))

    monkeypatch.setattr(fixed_modules, "F", SimpleNamespace(scaled_dot_product_attention=attend))
    model = fixed_modules.FixedDecoder("index_put", num_layers=1)
    ours = torch.compile(model, backend="specache", options={**OPTIONS, "strict": True})
    prompt = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(0))
    plain = fixed_modules.generate(fixed_modules.FixedDecoder("index_put", num_layers=1), prompt, 20, False)
    for expected, found in zip(plain, fixed_modules.generate(ours, prompt, 20, False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    stats = specache_fx.stats(model.layers[0].keys)
    assert (stats.steps, stats.exact_hit_rate) == (20, 1.0)


@pytest.mark.nightly
def test_transformers_softcap_and_padding() -> None:
    def generate(model: Any) -> Any:
        more = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        return model.generate(**left_padded((5, 12)), max_new_tokens=41, **more)

    small = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    plain = generate(build("gemma2", attn_implementation="eager", **small))
    model = build("gemma2", attn_implementation="flex_attention", **small)
    # A graph ends where transformers makes the block mask: the token is not in the decoder's.
    model.compile(backend="specache", options={**SMALL, "bits": 16, "strict": True, "lookahead": "query"})
    ours = generate(model)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)
    assert specache_fx.stats(ours.past_key_values).steps == 40
