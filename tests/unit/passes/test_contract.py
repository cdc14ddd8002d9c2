"""What every pass in the tables keeps to, whatever it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from support import graphs
from support.captured import MODELS, captured
from support.cases import nightly_unless
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from specache_fx.capture.analyse import analyse
from specache_fx.capture.graph.graph_edit import copy_graph
from specache_fx.capture.program import Phase, Program
from specache_fx.config import SpecacheConfig
from specache_fx.passes.base import Pass
from specache_fx.passes.pipeline import BINDING_PASSES, DECODE_PASSES

CACHED = (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)
BY_DAY = nightly_unless(lambda model: model != "llama", MODELS)  # its graphs are as the tiny decoder's
CONFIGS = {
    "token": SpecacheConfig(group_size=4, residual_length=4, top_k=4),
    "query": SpecacheConfig(group_size=4, residual_length=4, top_k=4, lookahead="query"),
    "none": SpecacheConfig(group_size=4, residual_length=4, top_k=4, lookahead="none"),
    "resident": SpecacheConfig(group_size=4, residual_length=4, top_k=4, resident_layers=1),
    "kcache": SpecacheConfig(group_size=4, residual_length=4, top_k=4, policy="kcache"),
    "kivi": SpecacheConfig(group_size=4, residual_length=4, policy="kivi"),
}


@cache
def traced(model: str, config: SpecacheConfig) -> tuple[GraphModule, Program]:
    """A model's decode graph before the first of `DECODE_PASSES`."""
    return graphs.decode_graph(captured(model)[Phase.DECODE], config)


@pytest.mark.parametrize("model", BY_DAY)
def test_capture_finds_every_phase(model: str) -> None:
    assert set(captured(model)) == set(CACHED)


def assert_each_keeps_the_contract(passes: Sequence[Pass], gm: GraphModule, program: Program) -> None:
    """Each pass in its place leaves a sound graph, and changes nothing when it runs again."""
    for step in passes:
        old = set(gm.graph.nodes)
        gm = step(gm, program)
        inserted = [node for node in gm.graph.nodes if node not in old]
        assert [node.name for node in inserted if not graphs.has_value(node)] == [], step.name
        # `specache_state` comes from no line of the model.
        made = [node for node in inserted if node.op != "placeholder"]
        assert [node.name for node in made if not node.meta.get("stack_trace")] == [], step.name
        gm.graph.lint()
        code, whole = gm.code, graphs.code(gm)
        gm.recompile()
        assert gm.code == code, step.name
        gm = step(gm, program)
        assert graphs.code(gm) == whole, step.name


@pytest.mark.parametrize("model", BY_DAY)
@pytest.mark.parametrize("phase", CACHED)
@pytest.mark.filterwarnings("error:Raw SymInt")
def test_binding_passes_leave_sound_graphs_change_nothing_again_and_leave_the_graph_of_dynamo_alone(
    phase: Phase, model: str
) -> None:
    graph = captured(model)[phase]
    code, names = graph.gm.code, graphs.code(graph.gm)
    gm = graph.copy()
    assert_each_keeps_the_contract(BINDING_PASSES[phase], gm, analyse(gm, CONFIGS["token"]))
    if phase is Phase.DECODE:
        traced(model, CONFIGS["token"])
    graph.gm.recompile()
    assert (graph.gm.code, graphs.code(graph.gm)) == (code, names)
    assert not any("specache" in key for node in graph.gm.graph.nodes for key in node.meta)


@pytest.mark.parametrize(
    ("model", "config"),
    nightly_unless(
        lambda case: case[0] != "llama",
        [
            *((model, "token") for model in MODELS),
            *(("tiny", config) for config in CONFIGS if config != "token"),
        ],
    ),
)
@pytest.mark.filterwarnings("error:Raw SymInt")
def test_DECODE_PASSES_leave_sound_graphs_and_change_nothing_when_they_run_again(
    model: str, config: str
) -> None:
    decode, program = traced(model, CONFIGS[config])
    assert_each_keeps_the_contract(DECODE_PASSES, copy_graph(decode), program)


_CHANGING = [step for step in DECODE_PASSES if step.name != "verify"]


@pytest.mark.parametrize("step", _CHANGING, ids=lambda step: step.name)
def test_every_decode_pass_changes_a_graph(step: Pass) -> None:
    def changes(model: str) -> bool:
        decode, program = traced(model, CONFIGS["token"])  # which these passes read, and leave as it is
        gm = copy_graph(decode)
        for earlier in DECODE_PASSES[: DECODE_PASSES.index(step)]:
            gm = earlier(gm, program)
        code = graphs.code(gm)
        return graphs.code(step(gm, program)) != code

    assert any(map(changes, MODELS)), (
        f"{step.name} changes no graph: give support/captured.py a model that has one"
    )


def test_a_graph_without_a_cache_stays_as_it_is() -> None:
    encoder = graphs.FunctionModule(lambda x: scaled_dot_product_attention(x, x * 2, x * 3).softmax(-1))
    (graph,) = graphs.capture(encoder, lambda forward: forward(torch.ones(1, 2, 3, 4)))
    code = graphs.code(graph.copy())
    gm, program = graphs.bound(graph, CONFIGS["token"])
    assert graphs.code(gm) == code
    assert (program.phase, program.sites, program.refusals) == (Phase.NO_CACHE, (), ())


@pytest.mark.parametrize("step", DECODE_PASSES, ids=lambda step: step.name)
def test_decode_pass_without_a_match_leaves_the_graph_as_it_is(step: Pass) -> None:
    gm = make_fx(lambda x: x.sin() + 1, tracing_mode="fake")(torch.ones(2, 3))
    code = graphs.code(gm)
    assert graphs.code(step(gm, Program(CONFIGS["token"]))) == code
