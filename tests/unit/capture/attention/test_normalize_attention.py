"""What `normalize_attention` reads from attention that is spelt out, and what it refuses to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from support.captured import captured
from torch import Tensor, nn

from specache_fx.capture.attention import run_form
from specache_fx.capture.attention.run_form import from_softmax
from specache_fx.capture.graph.graph_edit import CallsOnce
from specache_fx.capture.graph.graph_utils import shape_of
from specache_fx.capture.graph.left_alone import UnknownFormError
from specache_fx.capture.program import AttentionCore, Phase, Program

HERE = Path(__file__).name
MIN = torch.finfo(torch.float32).min
Core = Callable[..., Tensor]  # (query, keys, values, mask, sinks) -> output
CORES: list[tuple[Core, dict[str, Any]]] = []


class Attention(nn.Module):
    """One attention over an appended cache; `mask` is a padding mask, bool [batch, kv_len]."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, mask: Tensor) -> Any:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        return self.core(q, keys, values, mask[:, None, None, :], self.sinks), keys, values


def state_of(core: Core, kv_heads: int = 4, batch: int = 2, past: int = 5) -> Program:
    shapes = [
        (batch, 4, 1, 8),
        (batch, kv_heads, 1, 8),
        (batch, kv_heads, 1, 12),
        (batch, kv_heads, past, 8),
        (batch, kv_heads, past, 12),
    ]
    inputs = [*(torch.randn(shape) for shape in shapes), torch.ones(batch, past + 1, dtype=torch.bool)]
    with torch.no_grad():
        (captured,) = graphs.capture(Attention(core), lambda forward: forward(*inputs))
    return graphs.matched(captured)


def reads(**expected: Any) -> Callable[[Core], Core]:
    """A core that is read; `expected` are the scale, the softcap and the shapes of mask and sinks."""

    def register(core: Core) -> Core:
        CORES.append((core, expected))
        return core

    return register


def minimum(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, MIN)


@reads(scale=1.0)
def nothing_but_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@reads(scale=0.5, mask=(2, 1, 1, 6))
def scale_then_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + minimum(mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


@reads(scale=0.25, mask=(2, 1, 1, 6))
def mask_then_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    return ((torch.matmul(q, k.mT) + minimum(mask)) / 4.0).softmax(-1) @ v


@reads(scale=0.5, mask=(2, 1, 1, 6))
def fill_and_floor(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.permute(0, 1, 3, 2) / torch.full([], 2.0)).masked_fill(~mask, MIN)
    return torch.max(scores, torch.tensor(MIN)).softmax(3) @ v


@reads(scale=1.0, mask=(2, 1, 1, 6))
def two_masks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.where(torch.arange(6) < 6, q @ k.mT, torch.tensor(MIN)) + minimum(mask)
    return scores.softmax(-1) @ v


@reads(scale=0.1, softcap=3.0, mask=(2, 1, 1, 6))
def softcap_before_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    return (3.0 * torch.tanh(q @ k.mT * 0.1 / 3.0) + minimum(mask)).softmax(-1) @ v


@reads(scale=1.0, softcap=1.0)
def tanh_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT).softmax(-1) @ v


@reads(scale=0.5, mask=(2, 1, 1, 6), sinks=(4,))
def sinks_as_a_gate(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.5).masked_fill(~mask, torch.finfo(q.dtype).min)
    gate = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v * gate.unsqueeze(-1).to(q.dtype)


@reads(scale=1.0, mask=(2, 1, 1, 6), sinks=(4,))
def sinks_without_the_maximum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    column = sinks.reshape(1, -1, 1, 1).expand(2, -1, 1, -1)
    scores = torch.cat([q @ k.mT + minimum(mask), column], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


@reads(scale=0.5, mask=(2, 4, 1, 6))
def flat_heads_and_a_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    bias = (torch.arange(4.0)[:, None] * torch.arange(6)).repeat(2, 1)[:, None]
    flat = [x.reshape(8, -1, x.shape[-1]) for x in (q, k, v)]
    scores = bias.baddbmm(flat[0], flat[1].transpose(1, 2), beta=1.0, alpha=0.5)
    weights = (scores.view(2, 4, 1, 6) + minimum(mask)).softmax(-1).view(8, 1, 6)
    return torch.bmm(weights, flat[2]).view(2, 4, 1, 12)


@reads(scale=1.0, mask=(2, 1, 1, 6))
def written_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    scores += minimum(mask)
    return scores.masked_fill_(~mask, MIN).softmax(-1) @ v


@reads(scale=0.5, mask=(2, 1, 1, 6))
def a_mask_that_is_subtracted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    return (q @ k.mT * 0.5 - 1e30 * (~mask).float()).softmax(-1) @ v


@reads(scale=0.5, mask=(2, 1, 1, 6))
def a_mask_that_multiplies(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    seen = mask.to(q.dtype)
    return (q @ k.mT * 0.5 * seen - 1e9 * (1 - seen)).softmax(-1) @ v


def scaled_after_the_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT, sinks.reshape(1, -1, 1, 1).expand(2, -1, 1, 1)], dim=-1)
    return (scores * 0.5).softmax(-1)[..., :-1] @ v


def a_bias_for_other_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = (q @ k.mT).view(1, 8, 1, 6) + torch.arange(8.0)[:, None, None] * torch.arange(6)
    return scores.view(2, 4, 1, 6).softmax(-1) @ v


UNKNOWN: dict[str, Core] = {  # by what the reason names
    "relu": lambda q, k, v, mask, sinks: (torch.relu(q @ k.mT) + minimum(mask)).softmax(-1) @ v,
    "tanh": lambda q, k, v, mask, sinks: (3 * torch.tanh((q @ k.mT + minimum(mask)) / 3)).softmax(-1) @ v,
    "masked_fill": lambda q, k, v, mask, sinks: (q @ k.mT).masked_fill(~mask, -3.0).softmax(-1) @ v,
    "clamp": lambda q, k, v, mask, sinks: torch.clamp(q @ k.mT, min=-100.0).softmax(-1) @ v,
    "(mul": (lambda q, k, v, mask, sinks: (q @ k.mT * q.norm(dim=-1, keepdim=True)).softmax(-1) @ v),
    "changes its probabilities": (
        lambda q, k, v, mask, sinks: ((q @ k.mT).softmax(-1) * sinks[None, :, None, None]) @ v
    ),
    "is on": lambda q, k, v, mask, sinks: F.dropout((q @ k.mT).softmax(-1), p=0.5, training=True) @ v,
    "is not over the last": lambda q, k, v, mask, sinks: (q @ k.mT).softmax(1) @ v,
    "another product": lambda q, k, v, mask, sinks: (q @ k.mT + q.flip(-1) @ k.mT).softmax(-1) @ v,
    "is no product of queries and keys": (
        lambda q, k, v, mask, sinks: ((q * k).sum(-1)[:, :, None] + minimum(mask)).softmax(-1) @ v
    ),
    "neither keys nor one sink a head": scaled_after_the_sinks,
    "column": lambda q, k, v, mask, sinks: torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)[..., :-1] @ v,
    "be computed on small tensors": (
        lambda q, k, v, mask, sinks: (q @ k.mT).softmax(-1)[..., :-1] @ v[:, :, :-1]
    ),
    "(reshape": (lambda q, k, v, mask, sinks: (q @ k.mT).view(2, 4, 2, 3).softmax(-1).view(2, 4, 1, 6) @ v),
    "can't be computed on small tensors": a_bias_for_other_heads,
}


def sharper_at_one_key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[..., 5:] *= 0.5
    for i in range(2):  # one shows, one hides: of random ones few show the last key
        scores = scores.masked_fill(torch.arange(6) > 9 + i, MIN) + minimum(torch.arange(6) < 7 + i)
    return scores.masked_fill(~mask, MIN).softmax(-1) @ v


def bounded_in_some_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[:, 1:] = scores[:, 1:].clamp(max=1e5)
    return scores.softmax(-1) @ v


# Each of these is the normal form for small numbers, few keys, one head or one set of random numbers.
NEARLY: tuple[Core, ...] = (
    sharper_at_one_key,
    bounded_in_some_heads,
    lambda q, k, v, mask, sinks: (torch.tanh(q @ k.mT / sinks[0]) * sinks[0]).softmax(-1) @ v,
    lambda q, k, v, mask, sinks: (3 * torch.tanh(q @ k.mT / 3) / sinks[0]).softmax(-1) @ v,
    lambda q, k, v, mask, sinks: F.threshold((q @ k.mT).softmax(-1), 1e-5, 0.0) @ v,
)


@pytest.mark.parametrize("core", NEARLY, ids=("key", "heads", "softcap", "temperature", "pruned"))
def test_what_is_nearly_an_attention_is_refused(core: Core) -> None:
    program = state_of(core)
    assert program.sites == () and len(program.refusals) == 1


@pytest.mark.parametrize(("core", "expected"), CORES, ids=lambda value: getattr(value, "__name__", ""))
def test_attention_that_is_spelt_out_is_read(core: Core, expected: dict[str, Any]) -> None:
    program = state_of(core)
    assert program.refusals == ()
    assert (program.phase, len(program.sites)) == (Phase.DECODE, 1)
    (site,) = program.sites
    assert site.core.scale == pytest.approx(expected["scale"])
    assert site.core.softcap == expected.get("softcap")
    assert (site.core.mask and shape_of(site.core.mask)) == expected.get("mask")
    assert (site.core.sinks and shape_of(site.core.sinks)) == expected.get("sinks")
    assert site.shape[:3] == (4, 8, 12)


@pytest.mark.parametrize("past", [2, 3, 4, 5])
def test_a_proof_goes_on_where_its_random_masks_hide_all(past: int) -> None:
    def four_fills(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        for _ in range(4):  # each hides a third in the proof: the first numbers hide all
            scores = scores.masked_fill(~(mask | mask.clone()), MIN)
        return scores.softmax(-1) @ v

    program = state_of(four_fills, batch=1, past=past)
    assert program.refusals == () and len(program.sites) == 1


@pytest.mark.parametrize("operation", UNKNOWN)
def test_another_form_is_refused_by_the_operation_that_it_has(operation: str) -> None:
    program = state_of(UNKNOWN[operation])
    assert (program.phase, program.sites) == (Phase.NO_CACHE, ())
    (refusal,) = program.refusals
    assert refusal.reason.startswith("its form is not one that specache knows: `")
    assert operation in refusal.reason
    assert f"{HERE}:" in refusal.source
    assert "softmax" in refusal.source


def test_a_gate_that_is_no_sink_is_refused() -> None:
    def the_other_way_round(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        gate = (sinks.view(1, -1, 1) - torch.logsumexp(scores, dim=-1)).sigmoid()
        return scores.softmax(-1) @ v * gate[..., None]

    def of_other_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT
        gate = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).sigmoid()
        return (scores + minimum(mask)).softmax(-1) @ v * gate[..., None]

    for core in (the_other_way_round, of_other_scores):
        program = state_of(core)
        assert program.sites == ()
        (refusal,) = program.refusals
        assert "it differs from" in refusal.reason


def test_a_gate_that_reads_no_scores_stays_the_models() -> None:
    def gated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v * sinks.view(1, -1, 1, 1)

    program = state_of(gated)
    assert program.refusals == () and program.sites[0].core.sinks is None


def test_probabilities_that_are_returned_are_refused() -> None:
    class Returning(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, mask: Tensor) -> Any:
            keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
            weights = (q @ keys.mT).softmax(-1)
            return weights @ values, keys, values, weights.sum()

    inputs = [torch.randn(2, 4, n, 8) for n in (1, 1, 1, 5, 5)]
    with torch.no_grad():
        (captured,) = graphs.capture(
            Returning(nothing_but_products),
            lambda forward: forward(*inputs, torch.ones(2, 6, dtype=torch.bool)),
        )
    (refusal,) = graphs.matched(captured).refusals
    assert "`sum_1` (sum, test_normalize_attention.py" in refusal.reason
    assert refusal.reason.endswith("reads its probabilities: call the model with output_attentions=False")


def test_layers_that_add_the_same_mask_share_one_row() -> None:
    for phase in (Phase.PREFILL, Phase.EXTEND, Phase.DECODE):
        program = graphs.matched(captured("eager")[phase])
        assert len({site.core.mask for site in program.sites}) == 1


def test_a_prompt_is_proved_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> AttentionCore:
        gm = captured("eager")[Phase.PREFILL].copy()
        softmax = next(node for node in gm.graph.nodes if node.target is torch.ops.aten._softmax.default)
        return from_softmax(gm, softmax, set(gm.graph.output_node().all_input_nodes), CallsOnce())

    core = read()
    assert (shape_of(core.mask) or ())[-2] == (shape_of(core.query) or ())[2] > 1
    usual = run_form._mask_of

    def of_the_newest(softmax: Any, path: Any, layout: Any, calls: CallsOnce) -> Any:
        mask = usual(softmax, path, layout, calls)
        return mask if mask is None else calls.call(softmax, torch.ops.aten.slice.Tensor, mask, -2, -1)

    monkeypatch.setattr(run_form, "_mask_of", of_the_newest)
    with pytest.raises(UnknownFormError, match="on random numbers it differs"):
        read()
