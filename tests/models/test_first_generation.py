"""The first generation of a process is the same as later ones, where a cache counts its own tokens.

Dynamo takes a count for a constant until it has seen two values. A graph of such a constant has no position for the
speculative token. So the count is marked, and the step traced once more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.own_modules import VOCAB_SIZE, OwnConfig, OwnDecoder
from support.zoo import TWO_LANES, build
from torch import Tensor, nn

from specache_fx.backend import Backend
from specache_fx.capture.program import Phase
from specache_fx.runtime.session.session import Session

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {**TWO_LANES, "bits": 2, "strict": True}
GAIN = 3
# The length of a tensor, which is known to grow, and a count in each way that people keep one.
BEFORE: dict[str, Callable[[Any, Any, int], int]] = {
    "tensor": lambda cache, model, start: cache.keys[0].shape[2],
    "argument": lambda cache, model, start: start,
    "attribute": lambda cache, model, start: cache.seen,
    "list": lambda cache, model, start: cache.lengths[0],
    "dict": lambda cache, model, start: cache.state["seen"],
    "nested": lambda cache, model, start: cache.nested["of"]["tokens"],
    "comma": lambda cache, model, start: cache.state["seen, so far"],
    "module": lambda cache, model, start: model.seen,
    "python": lambda cache, model, start: len(range(cache.seen)) if cache.seen.bit_length() else 0,
}


class Cache:
    """Keys and values, and how many tokens they are."""

    keys: list[Tensor]
    values: list[Tensor]

    def __init__(self) -> None:
        self.seen, self.lengths = 0, [0]
        self.state = {"seen": 0, "gain": GAIN, "seen, so far": 0}
        self.nested = {"of": {"tokens": 0}}


class Counting(OwnDecoder):
    """Takes its positions from a count, not from the length of a tensor."""

    def __init__(self, count: str) -> None:
        super().__init__(OwnConfig("gpt", num_kv_heads=4))
        self.count, self.seen = count, 0

    def forward(  # type: ignore[override]
        self, ids: Tensor, past: Cache | None = None, start: int = 0
    ) -> tuple[Tensor, Cache]:
        q_len, before = ids.shape[1], 0 if past is None else BEFORE[self.count](past, self, start)
        positions = torch.arange(before, before + q_len)[None]
        gain = past.state["gain"] if past is not None and self.count == "dict" else GAIN
        x, keys, values = (self.embed(ids) + self.position_embed(positions)) * gain, [], []
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
        if self.count in ("attribute", "python"):
            past.seen += q_len
        elif self.count == "list":
            past.lengths[0] += q_len
        elif self.count == "dict":
            past.state["seen"] += q_len
        elif self.count == "nested":
            past.nested = {"of": {"tokens": before + q_len}}
        elif self.count == "comma":
            past.state["seen, so far"] += q_len
        elif self.count == "module":
            self.seen += q_len
        return self.head(self.norms[-1](x)), past


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """Of 8 steps that are fed the same tokens each time, float `[steps, batch, vocab_size]`."""
    ids = torch.randint(VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(4))
    found, past, start = [], None, 0
    for part in (ids[:, :32], *ids[:, 32:].split(1, dim=1)):
        piece = part.clone()  # Dynamo may take the place of a slice in its storage for a cache's length
        if isinstance(model, Counting):
            out, past = model(piece, past, start)
        else:
            result = model(piece, past_key_values=past, use_cache=True)
            out, past = result.logits, result.past_key_values
        start += piece.shape[1]
        found.append(out[:, -1])
    return torch.stack(found[1:])


def compiled(count: str, **options: Any) -> Counting:
    model = Counting(count)
    model.compile(backend="specache", options={**OPTIONS, **options})
    return model


def phases_of(model: nn.Module) -> list[Phase]:
    """Compile it. The phases of its graphs are filled in as they are made."""
    phases: list[Phase] = []

    def observe(name: str, _: Any, program: Any = None) -> None:
        if name == "verify":
            phases.append(program.phase)

    model.compile(backend=partial(Backend(), options=OPTIONS, observe=observe))
    return phases


@pytest.mark.parametrize(
    "count",
    nightly_unless(("nested", "module").__contains__, ["attribute", "list", "dict", "nested", "module"]),
)
def test_own_caches_that_count_their_tokens(count: str) -> None:
    """One decode graph serves all steps, and selects as the one that reads a tensor's length."""
    model = Counting(count)
    phases = phases_of(model)
    assert torch.equal(logits(model), logits(compiled("tensor")))
    assert phases.count(Phase.DECODE) == 1


@pytest.mark.parametrize("count", ["comma", "argument", "python"])
def test_lane_1_is_void_at_a_length_that_may_be_a_constant(
    count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These can't be marked. The step after the constant one has no guess, rather than one at a wrong position."""
    forgotten: list[int] = []
    forget = Session.forget_lookahead

    def noted(session: Session) -> None:
        forgotten.append(session.kv_len)
        forget(session)

    monkeypatch.setattr(Session, "forget_lookahead", noted)
    torch._dynamo.config.recompile_limit = 64
    logits(compiled(count))
    # Where Python reads the value, each length has a graph.
    assert 33 in forgotten and (34 in forgotten) == (count == "python")


class Scaled(Counting):
    """Counts its calls, and computes with their number in a way that Dynamo breaks at for a symbol."""

    def __init__(self) -> None:
        super().__init__("tensor")
        self.calls = 2

    def forward(self, *args: Any) -> tuple[Tensor, Cache]:  # type: ignore[override]
        self.calls += 1
        out, past = super().forward(*args)
        return out * (1 + divmod(self.calls, 1)[1]), past


def test_counters_of_other_things_stay_constants() -> None:
    model = Scaled()
    model.compile(backend="specache", options=OPTIONS, fullgraph=True)
    assert torch.equal(logits(model), logits(compiled("tensor")))


def test_marks_hold_for_one_frame() -> None:
    config: Any = torch.compiler.config
    traces: list[str] = []

    def interrupt(name: str, *_: Any) -> None:
        traces.append(config.dynamic_sources)
        if name == "dynamo" and "seen" in config.dynamic_sources:
            raise KeyboardInterrupt

    with config.patch(dynamic_sources="L['mine']"):
        logits(compiled("attribute"))
        assert config.dynamic_sources == "L['mine']"
        torch._dynamo.reset()
        model = Counting("attribute")
        model.compile(backend=partial(Backend(), options=OPTIONS, observe=interrupt))
        with pytest.raises(KeyboardInterrupt):
            logits(model)
        assert "seen" in traces[-1] and config.dynamic_sources == "L['mine']"


@pytest.mark.parametrize(
    "name",
    nightly_unless(lambda name: name != "gpt_oss-window", ["gemma3_text", "gpt_oss-window", "plain-window"]),
)
def test_windows_that_count_their_tokens(name: str) -> None:
    model = build(name)
    phases = phases_of(model)
    first = logits(model)
    assert torch.equal(first, logits(model))
    assert phases.count(Phase.DECODE) == 1
