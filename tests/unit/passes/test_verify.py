"""`verify` stops every broken decode graph: each test breaks a good one in one way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import graphs
from support.captured import captured
from torch.fx import GraphModule, Node

from specache_fx.capture.graph.graph_edit import call, copy_graph
from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.capture.program import Phase, Program
from specache_fx.config import SpecacheConfig
from specache_fx.errors import PassInvariantError
from specache_fx.passes.base import Pass
from specache_fx.passes.pipeline import DECODE_PASSES, run_passes
from specache_fx.passes.verify import verify
from specache_fx.runtime import ops  # noqa: F401  (registers torch.ops.specache)

OPS = torch.ops.specache


@pytest.fixture(scope="module")
def decode() -> tuple[GraphModule, Program]:
    """The decode graph of two layers, as it is before its operators are fused."""
    config = SpecacheConfig(group_size=4, residual_length=4, top_k=4)
    gm, program = graphs.decode_graph(captured("tiny")[Phase.DECODE], config)
    return run_passes(gm, program, DECODE_PASSES[: DECODE_PASSES.index(verify) + 1]), program


@pytest.fixture
def gm(decode: tuple[GraphModule, Program]) -> GraphModule:
    """A copy to break."""
    return copy_graph(decode[0])


@pytest.fixture
def program(decode: tuple[GraphModule, Program]) -> Program:
    return decode[1]


def first(gm: GraphModule, op: object, layer: int = 0) -> Node:
    return graphs.nodes_of(gm, op)[layer]


def test_verify_accepts_the_finished_graph(gm: GraphModule, program: Program) -> None:
    before = graphs.code(gm)
    assert graphs.code(verify(gm, program)) == before


def test_verify_refuses_a_read_without_a_wait(gm: GraphModule, program: Program) -> None:
    wait = first(gm, OPS.wait_prefetch.default)
    first(gm, OPS.quantized_attention.default).update_arg(3, None)
    gm.graph.erase_node(wait)
    with pytest.raises(PassInvariantError, match="no wait of its layer guards the staged pairs"):
        verify(gm, program)


def test_verify_refuses_the_wait_of_another_layer(gm: GraphModule, program: Program) -> None:
    first(gm, OPS.quantized_attention.default, 1).update_arg(3, first(gm, OPS.wait_prefetch.default, 0))
    with pytest.raises(PassInvariantError, match="no wait of its layer guards the staged pairs"):
        verify(gm, program)


def test_verify_refuses_a_prefetch_between_a_wait_and_its_read(gm: GraphModule, program: Program) -> None:
    attention, topk = first(gm, OPS.quantized_attention.default, 1), first(gm, OPS.topk.default, 0)
    with gm.graph.inserting_before(attention):
        early = call(gm.graph, OPS.topk.default, (*topk.args[:2], 1, *topk.args[3:]), topk)
        call(gm.graph, OPS.prefetch.default, (early, topk.args[1], 1), topk)
    with pytest.raises(PassInvariantError, match="a prefetch lies between its wait and its read"):
        verify(gm, program)


def test_verify_refuses_a_prefetch_of_what_another_layer_selected(gm: GraphModule, program: Program) -> None:
    first(gm, OPS.prefetch.default, 1).update_arg(0, first(gm, OPS.topk.default, 0))
    with pytest.raises(PassInvariantError, match="does not fetch the pairs that its own layer selected"):
        verify(gm, program)


def test_verify_refuses_a_prefetch_of_a_layer_that_is_all_on_the_device(
    gm: GraphModule, program: Program
) -> None:
    resident = replace(program, config=replace(program.config, resident_layers=1))
    with pytest.raises(PassInvariantError, match="it fetches pairs of a layer that is exact"):
        verify(gm, resident)


def test_verify_refuses_a_layer_that_is_not_appended(gm: GraphModule, program: Program) -> None:
    gm.graph.erase_node(first(gm, OPS.append.default))
    with pytest.raises(PassInvariantError, match=r"2 attentions became .* not one each"):
        verify(gm, program)


def test_verify_refuses_a_layer_that_is_appended_twice(gm: GraphModule, program: Program) -> None:
    append = first(gm, OPS.append.default)
    with gm.graph.inserting_after(append):
        gm.graph.node_copy(append)
    with pytest.raises(PassInvariantError, match=r"2 attentions became .* not one each"):
        verify(gm, program)


def test_verify_refuses_an_append_before_its_attention(gm: GraphModule, program: Program) -> None:
    first(gm, OPS.quantized_attention.default).prepend(first(gm, OPS.append.default))
    with pytest.raises(PassInvariantError, match="appended to: its own pair would count twice"):
        verify(gm, program)


def test_verify_refuses_a_marker_that_was_left_behind(gm: GraphModule, program: Program) -> None:
    attention = first(gm, OPS.quantized_attention.default)
    with gm.graph.inserting_before(attention):
        gm.graph.call_function(OPS.attention.default, (*attention.args[:3], 0.5))
    with pytest.raises(PassInvariantError, match="a marker was left behind"):
        verify(gm, program)


def test_verify_refuses_a_graph_that_reads_a_handle(gm: GraphModule, program: Program) -> None:
    placeholders(gm.graph)[0].meta["specache_input"] = program.past_inputs[0]
    with pytest.raises(PassInvariantError, match="still reads the contents of a handle"):
        verify(gm, program)


def test_verify_refuses_a_shape_that_is_not_static(gm: GraphModule, program: Program) -> None:
    dynamic = captured("tiny")[Phase.EXTEND]
    symbolic = next(
        value
        for node in dynamic.gm.graph.nodes
        if isinstance(value := graphs.value_of(node), torch.Tensor)
        and any(isinstance(size, torch.SymInt) for size in value.shape)
    )
    first(gm, OPS.append.default).args[0].meta["val"] = symbolic  # type: ignore[union-attr]
    with pytest.raises(PassInvariantError, match="its shape is not static"):
        verify(gm, program)


def test_verify_names_the_node_and_asks_for_a_report(gm: GraphModule, program: Program) -> None:
    first(gm, OPS.quantized_attention.default).update_arg(3, None)
    with pytest.raises(PassInvariantError, match=r"`attention\w*` = .*This is a defect: please report it"):
        verify(gm, program)


def test_verify_asks_for_no_wait_where_nothing_is_fetched() -> None:
    config = SpecacheConfig(group_size=4, residual_length=4, policy="kivi")
    gm, program = graphs.decode_graph(captured("tiny")[Phase.DECODE], config)
    run_passes(gm, program, DECODE_PASSES)
    assert graphs.nodes_of(gm, OPS.wait_prefetch.default) == []


def test_verify_refuses_an_append_of_another_lanes_pair(gm: GraphModule, program: Program) -> None:
    first(gm, OPS.append.default).args[0].update_arg(2, 1)  # type: ignore[union-attr]
    with pytest.raises(PassInvariantError, match="it appends another pair than lane 0's"):
        verify(gm, program)


def test_each_pass_is_verified(gm: GraphModule, program: Program) -> None:
    def forget(gm: GraphModule, _: Program) -> GraphModule:
        first(gm, OPS.topk.default).meta.pop("val")
        return gm

    def write(gm: GraphModule, _: Program) -> GraphModule:
        topk = first(gm, OPS.topk.default)
        with gm.graph.inserting_after(topk):
            call(gm.graph, torch.ops.aten.add_.Tensor, (topk, 1), topk)
        return gm

    for breaks, message in (
        (forget, "it has no fake value"),
        (write, "it writes to something else than an input"),
    ):
        with pytest.raises(PassInvariantError, match=message):
            run_passes(copy_graph(gm), program, [Pass(breaks)])
