"""`duplicate_query`: the decode graph for two tokens at once, the output token and the speculative one.

    out = specache.attention(q, k, v, scale)         # q [batch, num_heads, 1, key_dim]
        -> out = specache.attention(q, k, v, scale)  # q [lanes, batch, num_heads, 1, key_dim]

The graph is traced again under `torch.vmap` over lanes. Token ids and prelude tensors carry a leading lane dimension.
Everything else is shared, so each weight is read once for both. `batching_rules` has the operators that vmap doesn't
know. Of layers that compute the same one is traced (`capture/graph/segments.py`). The result is an ATen graph of static
shapes, in normal form, whose outputs have a leading lane dimension too.

With one lane (lookahead "query" or "none", policy "kivi", or where lanes can't be had) nothing is traced: sizes become
constants.

Unlike the passes before it, this one needs real inputs: it runs when the first decode step does.
Paper: SpeCache §3.3 and Alg. 3, "simultaneously decode two tokens".
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _remove_batch_dim, is_batchedtensor
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.vmap import lazy_load_decompositions, vmap_increment_nesting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate
from torch.fx.traceback import preserve_node_meta

from specache_fx.capture.graph.fake_results import results_of
from specache_fx.capture.graph.graph_edit import call, copy_graph
from specache_fx.capture.graph.graph_slices import is_assert
from specache_fx.capture.graph.graph_utils import placeholders, value_of
from specache_fx.capture.graph.segments import CannotCut, Joined, Segment, cut
from specache_fx.capture.graph.simplify import simplify
from specache_fx.capture.program import Program
from specache_fx.passes.batching_rules import register_batching_rules
from specache_fx.runtime.ops import SDPA

_EXPAND = torch.ops.aten.expand.default
_ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_MARKER = torch.ops.specache.attention.default


def lane_inputs(gm: GraphModule, program: Program) -> list[bool]:
    """The graph's inputs that differ from lane to lane: the token ids and the prelude tensors."""
    return [
        "specache_prelude" in node.meta
        or (program.token is not None and node.meta.get("specache_input") == program.token)
        for node in placeholders(gm.graph)
    ]


def duplicate_query(gm: GraphModule, program: Program, inputs: Sequence[Any], lanes: int) -> GraphModule:
    """Trace the decode graph for that many lanes.

    Args:
        gm: The graph after `split_prelude`. It stays as it is.
        program: The findings on it.
        inputs: One per placeholder; with two lanes, those of `lane_inputs` have a leading dimension of 2. Integers
            become constants of the result.
        lanes: 1 or 2.

    Returns:
        The ATen graph; its inputs are the tensors among `inputs`, in order.
    """
    flags = lane_inputs(gm, program)
    gm = copy_graph(gm)
    on_lanes = {node for node, flag in zip(placeholders(gm.graph), flags, strict=True) if flag}
    mode = _prepare(gm, inputs)
    if lanes == 1:
        _specialize(gm, mode)
    else:
        gm = _for_lanes(gm, on_lanes, lanes)
    simplify(gm.graph)
    return gm


def _specialize(gm: GraphModule, mode: FakeTensorMode) -> None:
    """Give nodes the values that follow from the inputs': sizes are numbers then, and asserts about them needless."""
    results = results_of(mode)

    def given(arg: Any) -> Any:
        if isinstance(arg, Node) and arg.op == "get_attr":
            return attrgetter(str(arg.target))(gm)
        return value_of(arg)

    with torch.no_grad(), enable_python_dispatcher(), mode:
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            args, kwargs = (map_aggregate(side, given) for side in (node.args, node.kwargs))
            node.meta["val"] = value = results.call(node.target, args, kwargs)
            if isinstance(value, (int, float)):
                node.replace_all_uses_with(value)
            is_said = isinstance(value, (bool, int, float)) or is_assert(node)  # other calls act
            if is_said and not node.users and not node.all_input_nodes:
                gm.graph.erase_node(node)


def _for_lanes(gm: GraphModule, on_lanes: set[Node], lanes: int) -> GraphModule:
    """Trace the graph for several lanes; `on_lanes` has the inputs that differ from lane to lane."""
    register_batching_rules()
    try:
        segments = cut(gm.graph, lambda node: node.target is _MARKER)
    except CannotCut:
        segments = [Segment.of(node for node in gm.graph.nodes if node.op not in ("placeholder", "output"))]
    joined = Joined(gm)
    for segment in segments:
        form = segment.fingerprint(on_lanes)
        like = joined.add(segment, form, lambda each: _traced(each, gm, on_lanes, lanes))
        outs: Any = like.graph.output_node().args[0]
        for node, out, flag in zip(segment.results, outs, like.meta["batched"], strict=True):
            node.meta["val"] = value_of(out)
            if flag:
                on_lanes.add(node)
    traced = joined.finish()
    for node, old in zip(placeholders(traced.graph), placeholders(gm.graph), strict=True):
        node.meta["specache_input"] = old.meta.get("specache_input")
    results: Any = gm.graph.output_node().args[0]
    _spread(traced, [node in on_lanes for node in results], lanes)
    return traced


def _prepare(gm: GraphModule, inputs: Sequence[Any]) -> FakeTensorMode:
    """Give the graph its inputs' values, integers as constants. Returns the mode of the values."""
    mode = FakeTensorMode(
        allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )
    for node, value in zip(placeholders(gm.graph), inputs, strict=True):
        if isinstance(value, Tensor):
            node.meta["val"] = mode.from_tensor(value)
        else:
            node.replace_all_uses_with(value)
            gm.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="call_function", target=SDPA):  # of an attention that is left alone
        more = dict(zip(("scale", "enable_gqa"), node.args[6:], strict=True))
        node.target, node.args, node.kwargs = _ATEN_SDPA, node.args[:6], more
    return mode


def _spread(traced: GraphModule, batched: Sequence[bool], lanes: int) -> None:
    """Give outputs that are the same in all lanes the dimension of lanes, too."""
    output = traced.graph.output_node()
    outs: Any = output.args[0]
    with traced.graph.inserting_before(output):
        output.args = (
            tuple(
                out if flag else call(traced.graph, _EXPAND, (out, [lanes, *value_of(out).shape]), out)
                for out, flag in zip(outs, batched, strict=True)
            ),
        )


def _traced(segment: Segment, gm: GraphModule, on_lanes: set[Node], lanes: int) -> GraphModule:
    """The ATen graph of a segment; its `meta["batched"]` says which of its results differ from lane to lane.

    Args:
        segment: The segment.
        gm: Its graph.
        on_lanes: The nodes that differ.
        lanes: 2.
    """
    batched = [False] * len(segment.results)
    run = Interpreter(segment.graph(gm)).run  # not a call of it: new nodes shall know the lines of the model

    def on_all(*values: Any) -> Any:
        lazy_load_decompositions()
        with vmap_increment_nesting(lanes, "different") as level:
            pairs = zip(values, segment.inputs, strict=True)
            results = run(*(_add_batch_dim(x, 0, level) if node in on_lanes else x for x, node in pairs))
            batched[:] = [isinstance(out, Tensor) and is_batchedtensor(out) for out in results]
            found = zip(results, batched, strict=True)
            return tuple(_remove_batch_dim(out, level, lanes, 0) if flag else out for out, flag in found)

    values = [value_of(node) for node in segment.inputs]
    trace = make_fx(on_all, tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad(), preserve_node_meta(), warnings.catch_warnings():
        # Operators without a batching rule run once a lane, and there are two: a warning would help no user.
        warnings.filterwarnings("ignore", "There is a performance drop")
        traced: GraphModule = trace(*values)
    traced.meta["batched"] = batched
    return traced
