"""Steps that Dynamo takes in pieces: a piece without token ids or logits has one lane, and names the break."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.fixed_modules import FixedDecoder, FixedLayer
from support.fixed_modules import generate as generate_in_buffers
from support.hooked import Hooked, logits
from support.own_modules import OwnConfig, OwnDecoder, greedy
from support.zoo import TWO_LANES
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {**TWO_LANES, "bits": 1, "top_k": 64, "lowering": "eager"}
BROKEN = (
    "torch._dynamo.graph_break() breaks the graph (Call to `torch._dynamo.graph_break()`: User-inserted graph"
)
COLLECTED = "gc.collect() breaks the graph (Attempted to call function marked as skipped: Dynamo"


class Collects(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        return self.inner(x)


def own_that_collects() -> nn.Module:
    model = OwnDecoder(OwnConfig())
    model.mlps = nn.ModuleList(map(Collects, model.mlps))
    return model


class BreaksBehindEmbedding(Hooked):
    """One break, and no loop behind it: a piece without caches, and one of all the rest."""

    def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


class AndDraws(BreaksBehindEmbedding):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        return super().attend(layer, q, k, v, hide) + 0 * torch.rand(1)


class BreaksBeforeHead(Hooked):
    def forward(self, ids: Tensor, past: Any = None, *more: Tensor) -> Any:
        start = 0 if past is None else past[0][0].shape[2]
        place = torch.arange(start + ids.shape[1])
        hide = place[start:, None] - place[None] < 0
        x = self.embed(ids) + self.positions(ids, start)
        x, pair = self.run_layer(0, x, hide, None if past is None else past[0])
        torch._dynamo.graph_break()
        return self.head(x), (pair,)


class CollectsInBuffers(FixedLayer):
    def forward(self, x: Tensor, where: Any, mask: Tensor | None) -> Tensor:
        gc.collect()
        return super().forward(x, where, mask)


def in_buffers() -> nn.Module:
    model = FixedDecoder("index_copy")
    for layer in model.layers:
        layer.__class__ = CollectsInBuffers
    return model


def run_in_buffers(model: Any) -> Tensor:
    return generate_in_buffers(model, torch.arange(20).reshape(2, 10), 4, by_number=False)[1]


def run_own(model: Any) -> Tensor:
    return greedy(model, padded=True, num_tokens=4).logits


NO_IDS, NO_LOGITS = "and this piece takes no token ids", "and this piece returns no logits"
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], tuple[str, ...]]] = {
    "in each layer": (own_that_collects, run_own, (COLLECTED, NO_IDS)),
    "behind the embedding": (BreaksBehindEmbedding, logits, (BROKEN, NO_IDS)),
    "before the head": (BreaksBeforeHead, logits, (BROKEN, NO_LOGITS)),
    "a second reason": (AndDraws, logits, (BROKEN, NO_IDS, "Besides, the model draws random numbers")),
    "in buffers": (in_buffers, run_in_buffers, (COLLECTED, NO_IDS)),
}


@pytest.mark.parametrize(
    "case", nightly_unless(lambda case: case not in ("in each layer", "in buffers"), CASES)
)
def test_a_piece_with_one_lane_names_the_break(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, run, named_parts = CASES[case]
    with caplog.at_level("WARNING", logger="specache_fx"):
        compiled = torch.compile(make(), backend="specache", options=OPTIONS)
        torch.testing.assert_close(run(compiled), run(make()), rtol=1e-3, atol=1e-3)
    (warning,) = caplog.messages
    assert warning.startswith('lookahead="token" is not possible here, "query" is used instead: ')
    torch._dynamo.reset()
    with pytest.raises((specache_fx.UnsupportedGraphError, BackendCompilerFailed)) as refused:
        run(torch.compile(make(), backend="specache", options={**OPTIONS, "strict": True}))
    report = str(specache_fx.explain(make(), options=OPTIONS, run=run))
    for message in (warning, str(refused.value), next(x for x in report.splitlines() if "instead of" in x)):
        places = [message.find(part) for part in ("test_step_pieces.py:", *named_parts)]
        assert -1 not in places and places == sorted(places), message
        assert "Take that out of the compiled code" in message and "TORCH_LOGS=graph_breaks" not in message


class AttendsByItself(Hooked):
    """Attention is in a piece of its own, to which each size of its inputs is open under `dynamic=True`."""

    def run_layer(self, layer: int, x: Tensor, hide: Tensor, past: Any) -> Any:
        q, k, v = (side.view(*x.shape[:2], 2, 16).transpose(1, 2) for side in self.qkv[layer](x).chunk(3, -1))
        torch._dynamo.graph_break()
        if past is not None:
            k, v = self.append(past[0], k), self.append(past[1], v)
        out = self.attend(layer, q, k, v, hide)
        torch._dynamo.graph_break()
        return x + out.transpose(1, 2).flatten(2), (k, v)


def test_an_open_head_dim_leaves_no_symbol_in_the_graph() -> None:
    compiled = torch.compile(AttendsByItself(), backend="specache", dynamic=True, options=OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(logits(compiled), logits(AttendsByItself()), rtol=1e-3, atol=1e-3)
    assert not [
        each.message for each in caught if "passed as argument to Graph.create_node" in str(each.message)
    ]
