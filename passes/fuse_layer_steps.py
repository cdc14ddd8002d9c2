"""`fuse_layer_steps`: the operators of a layer become one.

    staged = specache.wait_prefetch(state, layer)
    out, scores = specache.quantized_attention(q, k, v, staged, state, layer, scale)
    specache.append(k[0], v[0], state, layer)
    indices = specache.topk(scores, state, layer, batch, num_kv_heads, top_k)
    specache.prefetch(indices, state, layer)
        -> attended = specache.layer_step(q, k, v, state, layer, scale)

Or the two of a layer that selects nothing, or the six with lookahead "none", which attends twice.

After `verify`, which has seen that they are in order. On the CPU the one operator is C++ (`csrc/layer_step.h`), on a
GPU it is `specache.device_step` (`DeviceSteps`). Layers that attentions share and latent attention keep their
operators. So do all layers of a session that nothing runs as a whole (`Session.steps`): `build_decode_graph` leaves
this pass out.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_edit import call, erase_unused, finish
from specache_fx.capture.graph_utils import value_of
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass
from specache_fx.runtime.kernels import KERNELS, LayerForm
from specache_fx.runtime.native.products import is_products
from specache_fx.runtime.quant import make_quantizer

_ops, _aten = torch.ops.specache, torch.ops.aten


def _whole() -> dict[str, Any]:
    """The operators, by kernel."""
    device = _ops.device_step.default
    return {"cpu": _ops.layer_step.default, "triton": device, "aten": device}


def fuse_layer_steps(gm: GraphModule, program: Program, kernel: str) -> GraphModule:
    """Make one operator of each layer that has just these, and that `kernel` computes."""
    # Which argument of an operator says its layer.
    layer_of = {
        _ops.wait_prefetch.default: 1,
        _ops.quantized_attention.default: 5,
        _ops.append.default: 3,
        _ops.topk.default: 2,
        _ops.prefetch.default: 2,
    }
    steps: dict[Any, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.target in layer_of:
            steps[node.args[layer_of[node.target]]].append(node)
    wait, attention, append, *select = layer_of
    for layer, nodes in steps.items():
        exact = layer in program.exact_layers
        form = [attention, append]
        if program.config.stages and not exact:
            first = program.config.lookahead == "none"
            form = [attention, *select, wait, *form] if first else [wait, *form, *select]
        if [node.target for node in nodes] != form:
            continue
        attends = [node for node in nodes if node.target is attention][-1]
        appends = next(node for node in nodes if node.target is append)
        if _appends_own(attends, appends) and _fits(attends, program, kernel, exact):
            _fuse(gm, _whole()[kernel], attends, appends, nodes)
    return finish(gm)


def is_layer_step(node: Node) -> bool:
    """Whether one operator steps a layer here."""
    return node.target in _whole().values()


def whole_layers(gm: GraphModule) -> tuple[int, ...]:
    """The layers that one operator steps."""
    return tuple(node.args[4] for node in gm.graph.nodes if is_layer_step(node))


def is_whole(gm: GraphModule) -> bool:
    """Whether one operator steps each layer, and nothing else touches the session."""
    ours = (node for node in gm.graph.nodes if str(node.target).startswith("specache."))
    return all(is_layer_step(node) or is_products(node.target) for node in ours)


def _appends_own(attention: Node, append: Node) -> bool:
    """Whether the appended pair is lane 0's of the attention's: the one operator appends no other."""
    lane_0 = [(_aten.select.int, (side, 0, 0)) for side in attention.args[1:3]]
    return lane_0 == [(node.target, node.args) for node in append.args[:2] if isinstance(node, Node)]


def _fits(attention: Node, program: Program, kernel: str, exact: bool) -> bool:
    """Whether `kernel` computes this attention."""
    query, key, value, _, _, _, _, *form = attention.args
    expands = any(x is not None for x in form[2:])
    if kernel == "aten":
        return not expands
    config = program.config
    sides = [value_of(side) for side in (query, key, value)]
    lanes, _, num_heads, _, key_dim = sides[0].shape
    layer = LayerForm(
        dtypes=frozenset(side.dtype for side in sides),
        quantizer=None if exact else make_quantizer(config),
        key_dim=key_dim,
        value_dim=sides[2].shape[-1],
        lanes=lanes,
        num_queries=lanes * num_heads // sides[1].shape[2],
        expands=expands,
        aggregation=config.aggregation,
        cpu_reads=config.cpu_reads and not exact,
    )
    return KERNELS[kernel].misfit(layer) is None


def _fuse(gm: GraphModule, whole: Any, attention: Node, append: Node, nodes: list[Node]) -> None:
    query, key, value, _, *rest = attention.args  # state, layer, scale, softcap and sinks where there are any
    with gm.graph.inserting_before(attention):
        args = (query, key, value, *rest[:5])
        out = call(gm.graph, whole, args, attention, "attended")
    own = append.args[:2]
    for node in reversed(nodes):
        for result in list(node.users):  # of the attention: the others' are gone by then
            assert result.target is operator.getitem
            if result.args[1] == 0:
                result.replace_all_uses_with(out)
            gm.graph.erase_node(result)
        gm.graph.erase_node(node)
    for side in own:
        erase_unused(side, (_aten.select.int,))


def fuse_layer_steps_of(kernel: str) -> Pass:
    """The pass for sessions whose layers this kernel runs (`WholeSteps.kernel`)."""
    return Pass("fuse_layer_steps", functools.partial(fuse_layer_steps, kernel=kernel), optional=True)
