"""The first generation of a process is the same as later ones, where a cache counts its own tokens.

Dynamo takes a count for a constant until it has seen two values. A graph of such a constant has no position for the
speculative token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.own_modules import VOCAB_SIZE, OwnConfig, OwnDecoder
from support.zoo import SMALL, build
from torch import Tensor, nn

from specache_fx.backend import Backend
from specache_fx.capture.program import Phase

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {**SMALL, "bits": 2, "strict": True}
# The length of a tensor, which is known to grow, and a count in each way that people keep one.
BEFORE: dict[str, Callable[[Any, Any], int]] = {
    "tensor": lambda cache, model: cache.keys[0].shape[2],
    "attribute": lambda cache, model: cache.seen,
    "list": lambda cache, model: cache.lengths[0],
    "dict": lambda cache, model: cache.state["seen"],
    "module": lambda cache, model: model.seen,
}


class Cache:
    """Keys and values, and how many tokens they are."""

    keys: list[Tensor]
    values: list[Tensor]

    def __init__(self) -> None:
        self.seen, self.lengths, self.state = 0, [0], {"seen": 0}


class Counting(OwnDecoder):
    """Takes its positions from a count, not from the length of a tensor."""

    def __init__(self, count: str) -> None:
        super().__init__(OwnConfig("gpt", num_kv_heads=4))
        self.count, self.seen = count, 0

    def forward(self, ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:  # type: ignore[override]
        q_len, before = ids.shape[1], 0 if past is None else BEFORE[self.count](past, self)
        positions = torch.arange(before, before + q_len)[None]
        x, keys, values = self.embed(ids) + self.position_embed(positions), [], []
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            pair = None if past is None else (past.keys[i], past.values[i])
            y, (key, value) = attention(self.norms[2 * i](x), positions, pair, None)
            keys.append(key)
            values.append(value)
            x = x + y
            x = x + mlp(self.norms[2 * i + 1](x))
        if past is None:
            self.seen = 0
            past = Cache()
        past.keys, past.values = keys, values
        if self.count == "attribute":
            past.seen += q_len
        elif self.count == "list":
            past.lengths[0] += q_len
        elif self.count == "dict":
            past.state["seen"] += q_len
        elif self.count == "module":
            self.seen += q_len
        return self.head(self.norms[-1](x)), past


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """Of 8 steps that are fed the same tokens each time, float `[steps, batch, vocab_size]`."""
    ids = torch.randint(VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(4))
    found, past = [], None
    for piece in (ids[:, :32], *ids[:, 32:].split(1, dim=1)):
        if isinstance(model, Counting):
            out, past = model(piece.clone(), past)
        else:
            out, past = attrgetter("logits", "past_key_values")(
                model(piece, past_key_values=past, use_cache=True)
            )
        found.append(out[:, -1])
    return torch.stack(found[1:])


@pytest.mark.parametrize("count", [count for count in BEFORE if count != "tensor"])
def test_own_caches_that_count_their_tokens(count: str) -> None:
    """One decode graph serves all steps, and selects as the one that reads a tensor's length."""
    expected, model, phases = Counting("tensor"), Counting(count), []

    def observe(name: str, _: Any, program: Any = None) -> None:
        if name == "verify":
            phases.append(program.phase)

    expected.compile(backend="specache", options=OPTIONS)
    model.compile(backend=partial(Backend(), options=OPTIONS, observe=observe))
    assert torch.equal(logits(model), logits(expected))
    assert phases.count(Phase.DECODE) == 1


@pytest.mark.parametrize(
    "name",
    nightly_unless(
        lambda name: name in ("gemma3_text", "plain-window"),
        ["gemma3_text", "mistral-window", "gpt_oss-window", "plain-window", "plain-windows"],
    ),
)
def test_windows_that_count_their_tokens(name: str) -> None:
    model = build(name)
    model.compile(backend="specache", options=OPTIONS)
    first = logits(model)
    assert torch.equal(first, logits(model))
