"""`verify`: the invariants of every decode graph before its operators are fused (`docs/laws.md`, law 6).

Changes nothing. A failure is a defect of the passes, not of the model. `verify_form` has what every pass keeps to.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from specache_fx.capture.graph.graph_slices import writes_in_place
from specache_fx.capture.graph.graph_utils import placeholders, value_of
from specache_fx.capture.program import Program
from specache_fx.errors import PassInvariantError
from specache_fx.passes.base import Pass
from specache_fx.passes.select_topk import PROBE


def _fail(node: Node, what: str) -> None:
    raise PassInvariantError(
        f"`{node.name}` = {node.format_node()}: {what}. This is a defect: please report it."
    )


def verify_form(gm: GraphModule) -> None:
    """Check what holds after each pass: order, a fake value for each call, and no write but to an input.

    Raises:
        PassInvariantError: Names the node and the defect.
    """
    gm.graph.lint()
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.returns and value_of(node) is None:
            _fail(node, "it has no fake value")
        if writes_in_place(node) and getattr(node.args[0], "op", None) != "placeholder":
            _fail(node, "it writes to something else than an input")


@Pass
def verify(gm: GraphModule, program: Program) -> None:
    """Check waits, appends, markers and shapes.

    Raises:
        PassInvariantError: Names the node and the defect.
    """
    ops = torch.ops.specache
    pending: dict[Any, bool] = {}  # layer -> a prefetch may be under way: always, when a step begins
    exact = program.exact_layers
    appends: Counter[Any] = Counter()
    readers: Counter[Any] = Counter()
    pairs: dict[Any, Any] = {}  # layer -> keys and values of all lanes
    for node in gm.graph.nodes:
        if node.target is ops.attention.default:
            _fail(node, "a marker was left behind")
        elif node.target is ops.wait_prefetch.default:
            pending[node.args[1]] = False
        elif node.target is ops.prefetch.default:
            if node.args[0].target is not ops.topk.default or node.args[0].args[2] != node.args[2]:
                _fail(node, "it does not fetch the pairs that its own layer selected")
            pending[node.args[2]] = True
            if node.args[2] in exact:
                _fail(node, "it fetches pairs of a layer that is exact: they are all on the device")
        elif node.target is ops.append.default:
            appends[node.args[3]] += 1
            lane_0 = [(torch.ops.aten.select.int, (side, 0, 0)) for side in pairs.get(node.args[3], ())]
            if lane_0 and [(side.target, side.args) for side in node.args[:2]] != lane_0:
                _fail(node, "it appends another pair than lane 0's of its layer's last attention")
        elif node.target is ops.quantized_attention.default and not node.meta.get(PROBE):
            layer, staged = node.args[5], node.args[3]
            readers[layer] += 1
            pairs[layer] = node.args[1:3]
            if appends[layer]:
                _fail(node, "its layer has been appended to: its own pair would count twice")
            if program.config.stages and layer not in exact:
                if (
                    staged is None
                    or staged.target is not ops.wait_prefetch.default
                    or staged.args[1] != layer
                ):
                    _fail(node, "no wait of its layer guards the staged pairs that it reads")
                if pending.get(layer, True):
                    _fail(node, "a prefetch lies between its wait and its read")
    layers = ([site.layer for site in sites] for sites in (program.sites, program.owners))
    if (readers, appends) != tuple(map(Counter, layers)):
        raise PassInvariantError(
            f"{len(program.sites)} attentions became {dict(readers)} reads and {dict(appends)} appends (layer: count),"
            f" not one each (and one append for each of {len(program.owners)} layers). This is a defect: please report"
            " it."
        )
    for node in placeholders(gm.graph):
        if node.meta.get("specache_input") in program.past_inputs:
            _fail(node, "the graph still reads the contents of a handle")
    for node in gm.graph.nodes:
        for value in tree_leaves(value_of(node)):
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            if any(isinstance(size, torch.SymInt) for size in sizes):
                _fail(node, "its shape is not static: the graph still knows a length")
