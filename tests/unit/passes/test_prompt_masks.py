"""Which attentions of several tokens go by a rule, and that the others keep their masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from support.zoo import build
from torch import Tensor, nn

from specache_fx.backend import specache
from specache_fx.capture.program import Phase, Program
from specache_fx.errors import UnsupportedGraphError
from specache_fx.runtime.graph import prompt_masks as rules

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
HEADS, DIM, TOKENS = 2, 8, 40
OPTIONS = {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4, "lowering": "eager"}


class Layers(nn.Module):
    """Attentions by one mask; of some layers the newest pairs alone are returned.

    Args:
        kept: Of each layer, how many pairs; None for all.
        hides: A key that is hidden in place after the first layer.
        window: Tokens that the mask shows.
    """

    def __init__(self, kept: list[int | None], hides: int | None = None, window: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kept, self.hides, self.window = kept, hides, window
        self.embed = nn.Embedding(32, HEADS * DIM)
        self.sides = nn.ModuleList(nn.Linear(HEADS * DIM, 3 * HEADS * DIM) for _ in kept)
        self.head = nn.Linear(HEADS * DIM, 32)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        hidden, past = self.embed(ids), []
        places = torch.arange(ids.shape[1])
        mask = (places <= places[:, None]) & attention_mask[:, None, None, :]
        if self.window is not None:
            mask = mask & (places > places[:, None] - self.window)
        for layer, (side, kept) in enumerate(zip(self.sides, self.kept, strict=True)):
            q, k, v = side(hidden).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind()
            hidden = hidden + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
            past.append((k, v) if kept is None else (k[:, :, -kept:], v[:, :, -kept:]))
            if layer == 0 and self.hides is not None:
                mask[..., self.hides] = False
        return self.head(hidden), past


def telling(told: dict[Phase, tuple[int, int]]) -> Callable[..., Any]:
    """The backend, which tells how many attentions of a phase go by a rule, of how many."""

    def observe(name: str, gm: torch.fx.GraphModule, program: Program) -> None:
        if name == "prompt_masks":
            found = [str(node.target) for node in gm.graph.nodes]
            told[program.phase] = found.count("specache.prompt_attention.default"), len(program.sites)

    return partial(specache, options=OPTIONS, observe=observe)


@pytest.mark.parametrize(
    ("model", "by_rule"),
    [
        (Layers([None, None]), 2),
        (Layers([None, 7]), 2),  # one mask, held against two rules: the second follows none
        (Layers([3, 7], window=4), 2),
        (Layers([None, None], hides=5), 2),  # two masks
    ],
    ids=["one mask", "a window that sees all", "two windows", "written to"],
)
def test_prompt_is_the_models_own_whatever_shares_a_mask(model: Layers, by_rule: int) -> None:
    ids = torch.randint(32, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[0, :6] = False
    told: dict[Phase, tuple[int, int]] = {}
    with torch.no_grad():
        expected = model(ids, real)[0]
        logits = torch.compile(model, backend=telling(told))(ids, real)[0]
    torch.testing.assert_close(logits[real], expected[real])
    assert told[Phase.PREFILL][0] == by_rule


@pytest.mark.parametrize(
    ("name", "padded"), [("llama", True), pytest.param("gemma3_text", False, marks=pytest.mark.nightly)]
)
def test_tokens_that_follow_a_cache_go_by_the_rule(name: str, padded: bool) -> None:
    model, told = build(name, 1 if name == "llama" else None), {}
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(ids)
    if padded:
        real[0, :5] = 0

    def turns(run: Any) -> Tensor:
        past, logits = None, []
        for start, stop in ((0, 19), (19, 32), (32, TOKENS)):
            out = run(ids[:, start:stop], attention_mask=real[:, :stop], past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, 1)[real.bool()]

    with torch.no_grad():
        expected = turns(model)
        torch.testing.assert_close(turns(torch.compile(model, backend=telling(told))), expected)
    assert told == {phase: (len(model.model.layers),) * 2 for phase in (Phase.PREFILL, Phase.EXTEND)}


class OwnCache(Layers):
    """Layers that are given a mask and their past."""

    def forward(
        self, ids: Tensor, mask: Tensor, past: Any = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        hidden, cache = self.embed(ids), []
        for layer, side in enumerate(self.sides):
            q, k, v = side(hidden).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind()
            if past is not None:
                k, v = (torch.cat([old, new], 2) for old, new in zip(past[layer], (k, v), strict=True))
            cache.append((k, v))
            hidden = hidden + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return self.head(hidden), cache


def hides(kind: str, own: Tensor, keys: Tensor) -> Tensor:
    """What a kind of mask hides of what is causal, of the first row of a batch."""
    return {
        "nothing": keys > own + keys.numel(),
        "left padding": keys < 3,
        "right padding": keys >= keys.numel() - 2,
        "all but a window": keys <= own - 6,
        "a hole": keys == 5,
        "other documents": (keys // 7 != own // 7) & (keys > 1),
        "every other key": ((keys - own) % 2 == 1),
        "all of a query": (own == own[0]) & (keys >= 0),
    }[kind]


@pytest.mark.parametrize(
    ("dtype", "block"),
    nightly_unless(
        lambda case: case in ((torch.bool, 4), (torch.float32, 512)),
        itertools.product([torch.bool, torch.float32], [4, 512]),
    ),
)
def test_turns_are_the_models_own_under_every_mask(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_BLOCK", block)
    model = OwnCache([None, None])
    compiled = torch.compile(model, backend="specache", options=OPTIONS, dynamic=True)
    generator = torch.Generator().manual_seed(3)
    kinds = ("nothing", "left padding", "right padding", "all but a window", "a hole", "other documents")
    for kind in (*kinds, "every other key", "all of a query", "to a later key", "a bias"):
        past = ours = None
        kv_len = 0
        for q_len in (17, 9, 1, 6, 2):
            kv_len += q_len
            own, keys = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
            seen = (keys <= own).expand(2, 1, -1, -1).clone()
            if kind == "to a later key":
                seen[0] |= keys < 20
            elif kind != "a bias":
                seen[0] &= ~hides(kind, own, keys)
            mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            if kind == "a bias" and dtype != torch.bool:
                mask = mask - (own - keys).abs() * 0.1
            ids = torch.randint(32, (2, q_len), generator=generator)
            with torch.no_grad():
                expected, past = model(ids, mask, past)
                if dtype != torch.bool and kind == "all of a query" and q_len == 1:
                    # The plain model's numbers are of keys that it is not to see.
                    with pytest.raises(UnsupportedGraphError, match="hides every key of a row"):
                        compiled(ids, mask, ours)
                    break
                logits, ours = compiled(ids, mask, ours)
            torch.testing.assert_close(logits, expected, equal_nan=True)
