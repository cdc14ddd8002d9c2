"""Operators that two lanes share: the same numbers as lane by lane, and each weight read once."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (defines the operator)
from hypothesis import given
from hypothesis import strategies as st
from support.cases import nightly_unless
from support.graphs import by_phase, capture, decode_graph
from support.models import TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from support.zoo import build
from torch import Tensor

from specache_fx.capture.program import Phase
from specache_fx.config import SpecacheConfig
from specache_fx.passes.batching_rules import register_batching_rules

OPS = {
    "transformers": (torch.ops.transformers.grouped_mm_fallback, torch.float32),
    "aten": (torch.ops.aten._grouped_mm, torch.bfloat16),
}
PRODUCTS = {"mm", "addmm", "bmm", "grouped_mm_fallback", "_grouped_mm"}


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_grouped_product_equals_lane_by_lane(name: str, data: st.DataObject) -> None:
    op, dtype = OPS[name]
    lanes, experts, tokens = (data.draw(st.integers(1, top)) for top in (3, 5, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(lanes, tokens, 16, generator=generator).to(dtype)
    weight = torch.randn(experts, 16, 8, generator=generator).to(dtype)
    # Where each expert's tokens end; the last ones may have no expert.
    ends = torch.randint(tokens + 1, (lanes, experts), generator=generator).sort(-1).values.int()
    register_batching_rules()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it goes lane by lane
        found: Tensor = torch.vmap(lambda x, ends: op(x, weight, ends))(x, ends)
    for lane in range(lanes):
        held = int(ends[lane, -1])
        torch.testing.assert_close(found[lane, :held], op(x[lane], weight, ends[lane])[:held])


def packed_int4(generator: torch.Generator) -> tuple[Any, ...]:
    codes = torch.randint(16, (64, 64), generator=generator, dtype=torch.int32)
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return weight, 32, torch.randn(2, 64, 2, generator=generator)


def packed_int8(generator: torch.Generator) -> tuple[Any, ...]:
    codes = torch.randint(-128, 128, (64, 64), generator=generator, dtype=torch.int8)
    return codes, torch.rand(64, generator=generator)


def in_int8(generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randint(-128, 128, (64, 64), generator=generator).to(torch.int8),)


@pytest.mark.parametrize(
    ("op", "packed"),
    [
        (torch.ops.aten._weight_int4pack_mm_for_cpu, packed_int4),
        (torch.ops.aten._weight_int8pack_mm, packed_int8),
        (torch.ops.aten._int_mm, in_int8),
    ],
    ids=["int4", "int8", "int8 rows"],
)
@pytest.mark.parametrize("in_dim", [0, 1])
def test_packed_product_equals_lane_by_lane(op: Any, packed: Any, in_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rest = packed(generator)
    x = torch.randn(2, 3, 64, generator=generator)
    x = (20 * x).to(torch.int8) if packed is in_int8 else x
    register_batching_rules()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.vmap(lambda rows: op(rows, *rest), in_dims=in_dim)(x.movedim(0, in_dim))
    torch.testing.assert_close(found, torch.stack([op(lane, *rest) for lane in x]))


def test_packed_product_with_a_weight_a_lane_goes_lane_by_lane() -> None:
    generator = torch.Generator().manual_seed(0)
    codes, scales = packed_int8(generator)
    register_batching_rules()
    x, both = torch.randn(3, 64, generator=generator), torch.stack([scales, 2 * scales])
    op = torch.ops.aten._weight_int8pack_mm
    found = torch.vmap(lambda scale: op(x, codes, scale))(both)
    torch.testing.assert_close(found[1], op(x, codes, both[1]))


@pytest.mark.parametrize("model", nightly_unless("qwen3_moe".__eq__, ["llama", "mixtral", "qwen3_moe"]))
def test_no_weight_is_read_twice(model: str, fresh_dynamo: None) -> None:
    """As many products for two lanes as for one."""

    def products(lanes: int) -> Counter[Any]:
        lookahead = "token" if lanes == 2 else "query"
        config = SpecacheConfig(bits=2, group_size=4, residual_length=4, top_k=3, lookahead=lookahead)
        gm, _ = decode_graph(graph, config)
        names = [str(getattr(node.target, "_opname", "")) for node in gm.graph.nodes]
        return Counter(name for name in names if name in PRODUCTS)

    def drive(forward: Any) -> None:
        ids = torch.arange(14).view(2, 7)
        past = forward(ids[:, :6], use_cache=True).past_key_values
        forward(ids[:, 6:], past_key_values=past, use_cache=True)

    graph = by_phase(capture(build(model, 1), drive))[Phase.DECODE]
    one, two = products(1), products(2)
    assert sum(one.values()) == sum(two.values()) >= 7
    assert model == "llama" or two["grouped_mm_fallback"] >= 2


class MasksTokens(TinyDecoder):
    """Tokens that stand for something else are replaced in a copy of the input, as models with pictures do."""

    def embed_inputs(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Any]:
        ids = input_ids.clone()
        ids[input_ids == 7] = 0
        return super().embed_inputs(ids, position_ids)


def test_tokens_that_are_replaced_in_a_copy_keep_both_lanes(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = MasksTokens(TinyConfig(num_layers=1))
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 4] = 7
    plain = generate(model, ids, 20)
    options = {
        "bits": 16,
        "group_size": 4,
        "residual_length": 4,
        "top_k": 4,
        "lowering": "eager",
        "lookahead": "token",
    }
    ours = generate(torch.compile(model, backend="specache", options=options), ids, 20)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=2e-4, atol=2e-4)
    session = session_of(ours.past)
    assert session.metrics.hits.token_checks == session.metrics.hits.token_hits == 36
    assert "not possible here" not in caplog.text
