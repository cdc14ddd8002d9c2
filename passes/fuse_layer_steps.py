"""`fuse_layer_steps`: the operators of a layer become one.

    staged = specache.wait_prefetch(state, layer)
    out, scores = specache.quantized_attention(q, k, v, staged, state, layer, scale)
    specache.append(k[0], v[0], state, layer)
    indices = specache.topk(scores, state, layer, batch, num_kv_heads, top_k)
    specache.prefetch(indices, state, layer)
        -> attended = specache.layer_step(q, k, v, state, layer, scale)

Or the two of a layer that selects nothing, or the six with lookahead "none", which attends twice.

After `verify`, which has seen that they are in order. On the CPU the one operator is C++ (`csrc/layer_step.h`), on a
GPU it is `specache.device_step` (`DeviceSteps`). `Program.fused` has the layers and their operators.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass
from specache_fx.runtime.native.products import is_products

_ops = torch.ops.specache
# Which argument of an operator says its layer.
_LAYER_OF = {
    _ops.wait_prefetch.default: 1,
    _ops.quantized_attention.default: 5,
    _ops.append.default: 3,
    _ops.topk.default: 2,
    _ops.prefetch.default: 2,
}


@partial(Pass, optional=True)
def fuse_layer_steps(gm: GraphModule, program: Program) -> None:
    """Make one operator of each layer in `Program.fused`."""
    steps: dict[Any, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.target in _LAYER_OF:
            steps[node.args[_LAYER_OF[node.target]]].append(node)
    for layer, nodes in steps.items():
        if layer in program.fused:
            _fuse(gm, program.fused[layer], nodes)


def _fuse(gm: GraphModule, whole: Any, nodes: list[Node]) -> None:
    *_, attention = (node for node in nodes if node.target is _ops.quantized_attention.default)
    query, key, value, _, *rest = attention.args  # state, layer, scale, softcap and sinks where there are any
    with gm.graph.inserting_before(attention):
        out = call(gm.graph, whole, (query, key, value, *rest[:5]), attention, "attended")
    for node in reversed(nodes):
        for result in list(node.users):  # of the attention: the others' are gone by then
            assert result.target is operator.getitem
            if result.args[1] == 0:
                result.replace_all_uses_with(out)
            gm.graph.erase_node(result)
        gm.graph.erase_node(node)


def is_layer_step(node: Node) -> bool:
    """Whether one operator steps a layer here."""
    return node.target in (_ops.layer_step.default, _ops.device_step.default)


def whole_layers(gm: GraphModule) -> tuple[int, ...]:
    """The layers that one operator steps."""
    return tuple(node.args[4] for node in gm.graph.nodes if is_layer_step(node))


def is_whole(gm: GraphModule) -> bool:
    """Whether one operator steps each layer, and nothing else touches the session."""
    ours = (node for node in gm.graph.nodes if str(node.target).startswith("specache."))
    return all(is_layer_step(node) or is_products(node.target) for node in ours)
