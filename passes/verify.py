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
from specache_fx.capture.graph.graph_utils import value_of
from specache_fx.capture.program import Program
from specache_fx.errors import PassInvariantError
from specache_fx.passes.base import Pass
from specache_fx.passes.select_topk import PROBE

_OPS = torch.ops.specache


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
    _check_prefetches(gm, program)
    _check_appends(gm, program)
    for node in gm.graph.nodes:
        if node.target is _OPS.attention.default:
            _fail(node, "a marker was left behind")
        if node.op == "placeholder" and node.meta.get("specache_input") in program.past_inputs:
            _fail(node, "the graph still reads the contents of a handle")
        for value in tree_leaves(value_of(node)):
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            if any(isinstance(size, torch.SymInt) for size in sizes):
                _fail(node, "its shape is not static: the graph still knows a length")


def _check_prefetches(gm: GraphModule, program: Program) -> None:
    """A prefetch fetches its own layer's selection, and a wait stands between it and the attention that reads it."""
    pending: dict[Any, bool] = {}  # layer -> a prefetch may be under way: always, when a step begins
    for node in gm.graph.nodes:
        if node.target is _OPS.wait_prefetch.default:
            pending[node.args[1]] = False
        elif node.target is _OPS.prefetch.default:
            selection, layer = node.args[0], node.args[2]
            if selection.target is not _OPS.topk.default or selection.args[2] != layer:
                _fail(node, "it does not fetch the pairs that its own layer selected")
            if layer in program.exact_layers:
                _fail(node, "it fetches pairs of a layer that is exact: they are all on the device")
            pending[layer] = True
        elif _reads(node) and program.config.stages and node.args[5] not in program.exact_layers:
            layer, staged = node.args[5], node.args[3]
            if staged is None or staged.target is not _OPS.wait_prefetch.default or staged.args[1] != layer:
                _fail(node, "no wait of its layer guards the staged pairs that it reads")
            if pending.get(layer, True):
                _fail(node, "a prefetch lies between its wait and its read")


def _check_appends(gm: GraphModule, program: Program) -> None:
    """Each attention became one read; each layer has one append, of lane 0's pair, behind all of its reads."""
    appends: Counter[Any] = Counter()
    readers: Counter[Any] = Counter()
    pairs: dict[Any, Any] = {}  # layer -> keys and values of all lanes
    for node in gm.graph.nodes:
        if node.target is _OPS.append.default:
            layer = node.args[3]
            appends[layer] += 1
            lane_0 = [(torch.ops.aten.select.int, (side, 0, 0)) for side in pairs.get(layer, ())]
            if lane_0 and [(side.target, side.args) for side in node.args[:2]] != lane_0:
                _fail(node, "it appends another pair than lane 0's of its layer's last attention")
        elif _reads(node):
            layer = node.args[5]
            readers[layer] += 1
            pairs[layer] = node.args[1:3]
            if appends[layer]:
                _fail(node, "its layer has been appended to: its own pair would count twice")
    layers = ([site.layer for site in sites] for sites in (program.sites, program.owners))
    if (readers, appends) != tuple(map(Counter, layers)):
        raise PassInvariantError(
            f"{len(program.sites)} attentions became {dict(readers)} reads and {dict(appends)} appends (layer: count),"
            f" not one each (and one append for each of {len(program.owners)} layers). This is a defect: please report"
            " it."
        )


def _reads(node: Node) -> bool:
    """Whether it is a layer's attention, and no probe of its scores."""
    return node.target is _OPS.quantized_attention.default and not node.meta.get(PROBE)
