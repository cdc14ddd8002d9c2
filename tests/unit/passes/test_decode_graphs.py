"""The attention of a decode graph, whole, after each pass. The graph is a one-layer `TinyDecoder`'s."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from support import graphs
from support.graphs import Captured
from torch.fx import GraphModule

from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.capture.program import Phase
from specache_fx.config import SpecacheConfig
from specache_fx.passes.pipeline import DECODE_PASSES, run_passes
from specache_fx.passes.quantize_attention import quantize_attention

NAMES = ["duplicate_query", *(step.name for step in DECODE_PASSES)]
SMALL: dict[str, Any] = {"group_size": 4, "residual_length": 4, "top_k": 4}
TWO_LANES = {**SMALL, "lookahead": "token"}
QKV = "products = products.of3(x, w, w, w)"
OTHERS = [f"products = products.of{weights.count('w')}(x, {weights})" for weights in ("w", "w, w", "w", "w")]
ATTEND = [
    "attention = quantized_attention(q, k, v, None, specache_state, 0, 0.5)",
    "append = append(own_k, own_v, specache_state, 0)",
]
SELECT = "indices = topk(scores, specache_state, 0, 2, 2, 4)"
FETCH = "prefetch = prefetch(indices, specache_state, 0)"
WAIT = "staged = wait_prefetch(specache_state, 0)"
STAGED = [line.replace("None", "staged") for line in ATTEND]
GOLDEN = {  # of the passes that change our own operators
    "duplicate_query": ["attention = attention(q, k, v, 0.5)"],
    "quantize_attention": ATTEND,
    "select_topk": [*ATTEND, SELECT],
    "insert_prefetch": [*ATTEND, SELECT, FETCH],
    "insert_waits": [WAIT, *STAGED, SELECT, FETCH],
    "few_row_products": [QKV, WAIT, *STAGED, SELECT, FETCH, *OTHERS],
    "fuse_layer_steps": [QKV, "attended = layer_step(q, k, v, specache_state, 0, 0.5)", *OTHERS],
}


SAME_STEP = {"lookahead": "none", "key_share": 0.01}  # attention reads its pairs by itself


@cache
def captured() -> dict[Phase, Captured]:
    return graphs.by_phase(graphs.capture(graphs.tiny_decoder(scale=0.5), graphs.drive_tiny))


def shown(gm: GraphModule) -> str:
    """The calls of ours, weights and what they multiply by what they are and not by name."""
    calls = re.sub(r"products(_\d+)?( = products\.of\d\()\w+", r"products\2x", graphs.calls(gm))
    return re.sub(r"\b(arg\d+_1|l_self_\w+_weight_)", "w", calls)


def after_capture(phase: Phase) -> list[str]:
    return shown(graphs.bound(captured()[phase])[0]).splitlines()


def after(name: str, config: SpecacheConfig) -> list[str]:
    """The calls after the pass of that name; after tracing, if it is "duplicate_query"."""
    gm, program = graphs.decode_graph(captured()[Phase.DECODE], config)
    if name != "duplicate_query":
        count = 1 + [step.name for step in DECODE_PASSES].index(name)
        gm = run_passes(gm, program, DECODE_PASSES[:count])
    calls = re.sub(r"(attention|layer_step)\(\w+, \w+, \w+,", r"\1(q, k, v,", shown(gm))
    calls = re.sub(r"\battention_1 = ", "attention = ", calls)
    calls = re.sub(r"append\(\w+, \w+,", "append(own_k, own_v,", calls)
    return re.sub(r"topk\(\w+,", "topk(scores,", calls).splitlines()


def test_prefill_stores_each_layer_after_its_own_attention() -> None:
    assert after_capture(Phase.PREFILL) == [
        "attended = prompt_attention(q_1, k_1, v, getitem_8, getitem_9, specache_state, 0, 0.5, None)",
        "store = store(k_1, v, select_int, specache_state, 0)",
    ]


def test_extend_loads_the_past_and_stores_what_is_new() -> None:
    read = "q_1, getitem_8, getitem_9, getitem_10, getitem_11"
    assert after_capture(Phase.EXTEND) == [
        QKV,
        "load = load(l_past_0_0_, l_past_0_1_, k_1, v, specache_state, 0)",
        f"attended = prompt_attention({read}, specache_state, 0, 0.5, None)",
        "store = store(k_1, v, select_int, specache_state, 0)",
        *OTHERS,
    ]


def test_decode_has_a_marker_for_its_attention() -> None:
    assert after_capture(Phase.DECODE) == ["attention = attention(q_1, k_1, v, 0.5)"]


@pytest.mark.parametrize("name", NAMES)
def test_decode_with_two_lanes(name: str) -> None:
    earlier = next(each for each in reversed(NAMES[: NAMES.index(name) + 1]) if each in GOLDEN)
    assert after(name, SpecacheConfig(**TWO_LANES)) == GOLDEN[earlier]


def test_every_golden_graph_is_that_of_a_pass() -> None:
    assert set(GOLDEN) <= set(NAMES)


@pytest.mark.parametrize("options", [{"lookahead": "none"}, {"policy": "kcache"}], ids=str)
def test_decode_without_lookahead_selects_and_fetches_before_it_attends(options: dict[str, Any]) -> None:
    config, probe = SpecacheConfig(**SMALL, **options), ATTEND[0].replace("attention =", "probe =")
    assert after("insert_waits", config) == [probe, SELECT, FETCH, WAIT, *STAGED]
    # The C++ step reads codes: those of keys alone it has none of.
    fused = GOLDEN["fuse_layer_steps"] if config.policy == "specache" else after("verify", config)
    assert after("fuse_layer_steps", config) == fused


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("verify", {"lookahead": "query"}, GOLDEN["few_row_products"]),  # the same calls for its single lane
        ("fuse_layer_steps", {"resident_layers": 1}, GOLDEN["fuse_layer_steps"]),
        ("fuse_layer_steps", {"policy": "kivi"}, GOLDEN["fuse_layer_steps"]),
        ("insert_waits", {"policy": "kivi"}, ATTEND),
        ("insert_waits", SAME_STEP, ATTEND),
        ("fuse_layer_steps", SAME_STEP, GOLDEN["fuse_layer_steps"]),
        ("insert_waits", {"resident_layers": 1}, ATTEND),
        ("insert_waits", {"resident_layers": 9}, ATTEND),
    ],
)
def test_decode_with_other_options(name: str, options: dict[str, Any], expected: list[str]) -> None:
    assert after(name, SpecacheConfig(**SMALL, **options)) == expected


def test_layers_of_one_trace_keep_their_numbers_and_weights() -> None:
    model = graphs.tiny_decoder(scale=0.5, num_layers=5)
    decode = graphs.by_phase(graphs.capture(model, graphs.drive_tiny))[Phase.DECODE]
    gm, program = graphs.decode_graph(decode, SpecacheConfig(**TWO_LANES))
    markers = graphs.nodes_of(gm, torch.ops.specache.attention.default)
    assert len(markers) == 5
    assert len({id(node.meta["val"]) for node in markers}) == 2  # the first layer comes with the embedding
    readers = [len(node.users) for node in placeholders(gm.graph) if "_weight_" in node.name]
    assert len(readers) > 5 * 7 and set(readers) <= {1, 2}  # the embedding is the head, too
    attended = graphs.nodes_of(
        quantize_attention(gm, program), torch.ops.specache.quantized_attention.default
    )
    assert [node.args[5] for node in attended] == list(range(5))
