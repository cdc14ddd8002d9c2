"""`bind_cache`: the KV cache leaves the graph.

Past and present KV become handles. The operators that move the pairs depend on the phase:

    prefill   out = sdpa(q, k, v, mask)                 ->  out = sdpa(q, k, v, mask)
              return keys, values, logits                   specache.store(k, v, select(mask, -2, -1), state, layer)
                                                            return logits

    extend    keys = cat([past_keys, k], -2)            ->  keys, values = specache.load(past_keys, past_values, k, v,
              values = cat([past_values, v], -2)                                         state, layer)
              out = sdpa(q, keys, values, mask)             out = sdpa(q, keys, values, mask)
              return keys, values, logits                   specache.store(k, v, mask[..., -1, :], state, layer)
                                                            return logits

    decode    out = sdpa(q, cat([past_keys, k], -2), ..) ->  out = specache.attention(q, k, v, scale, softcap, sinks)
              return keys, values, logits                   return logits

Storing right after each attention keeps one layer's 16-bit pairs alive at a time. In decode nothing reads
the masks any more, so they and all that knew `kv_len` die here. `specache_fx/runners/step_masks.py` applies masks
beyond padding at run time.

Latent attention (MLA): the marker gets the new token's latent and the width of its output.

Attentions that share a cache: the first one's pairs are stored and loaded. In decode each gets a marker with its own
query and the first one's new pair. Markers are in the order of `Program.sites`.

Without attentions to rewrite it leaves the graph as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from specache_fx.capture.attention.run_form import in_model_order
from specache_fx.capture.graph.graph_edit import add_placeholder, call
from specache_fx.capture.graph.graph_slices import eliminate_dead_code
from specache_fx.capture.graph.graph_utils import placeholders, same_sizes, shape_of, value_of
from specache_fx.capture.program import AttentionSite, Phase, Program
from specache_fx.passes.base import Pass
from specache_fx.runtime import ops  # noqa: F401  (registers torch.ops.specache)
from specache_fx.runtime.steps.step_table import empty_state

STATE = "specache_state"
_aten = torch.ops.aten
_BOUND = (torch.ops.specache.store.default, torch.ops.specache.attention.default)


def _bind_prefill(graph: Graph, site: AttentionSite, state_node: Node) -> None:
    for side in (site.keys, site.values):
        if side.root is not side.new:
            side.root.replace_all_uses_with(side.new)  # a cat with nothing: a copy that nobody needs
    _store(graph, site, state_node)


def _store(graph: Graph, site: AttentionSite, state_node: Node) -> None:
    row = site.core.mask if site.keys.window is None else None
    with graph.inserting_before(site.core.node.next):
        if len(shape_of(row) or ()) > 1:  # the newest query's: which keys are real
            row = call(graph, _aten.select.int, (row, -2, -1), site.core.node)
        args = (site.keys.new, site.values.new, row, state_node, site.layer)
        call(graph, torch.ops.specache.store.default, args, site.core.node)


def _bind_extend(graph: Graph, site: AttentionSite, state_node: Node) -> None:
    assert site.keys.past is not None and site.values.past is not None
    order = {node: i for i, node in enumerate(graph.nodes)}
    roots, new = (site.keys.root, site.values.root), (site.keys.new, site.values.new)
    first, last = (choose(roots, key=order.__getitem__) for choose in (min, max))
    # A model may read keys before it has values: it appends these by itself.
    whole = all(order[user] > order[last] for root in roots for user in root.users)
    with graph.inserting_before(last if whole else first):
        args = (site.keys.past, site.values.past, *(new if whole else (None, None)), state_node, site.layer)
        pair = call(graph, torch.ops.specache.load.default, args, site.core.node)
        sides = [call(graph, operator.getitem, (pair, i), site.core.node) for i in (0, 1)]
    for root, past, side in zip(roots, (site.keys.past, site.values.past), sides, strict=True):
        if whole:
            root.replace_all_uses_with(side)
        else:
            root.replace_input_with(past, side)
    _store(graph, site, state_node)


def _bind_decode(graph: Graph, site: AttentionSite) -> None:
    core, value = site.core, value_of(site.core.node)
    more: tuple[Any, ...] = () if core.softcap is None and core.sinks is None else (core.softcap, core.sinks)
    if site.expansion is not None:
        more = (core.softcap, core.sinks, value.shape[-1])
    with graph.inserting_before(core.node):
        args = (core.query, site.keys.new, site.values.new, core.scale, *more)
        out = call(graph, torch.ops.specache.attention.default, args, core.node)
        if core.is_turned:
            out = in_model_order(out, site.shape.num_kv_heads, core.node)
        if not same_sizes(
            value.shape, value_of(out).shape
        ):  # batch and heads are one, or heads are rows or groups
            out = call(graph, _aten.reshape.default, (out, [-1, *value.shape[1:]]), core.node)
        if value.dtype != value_of(out).dtype:
            out = call(graph, _aten._to_copy.default, (out,), core.node, kwargs={"dtype": value.dtype})
    core.node.replace_all_uses_with(out)
    graph.erase_node(core.node)


@Pass
def bind_cache(gm: GraphModule, program: Program) -> None:
    """Replace the KV cache by handles and ops."""
    graph = gm.graph
    if program.outputs is None or any(node.target in _BOUND for node in graph.nodes):
        return
    output = graph.output_node()
    outs: Any = output.args[0]
    output.args = (tuple(outs[i] for i in program.outputs.kept),)
    if program.phase is Phase.DECODE:
        for place, node in enumerate(placeholders(graph)):
            node.meta["specache_input"] = place
        for site in program.sites:
            _bind_decode(graph, site)
    else:
        state_node = add_placeholder(graph, STATE, empty_state(len(program.owners)))
        bind = _bind_prefill if program.phase is Phase.PREFILL else _bind_extend
        for site in program.owners:
            bind(graph, site, state_node)
    eliminate_dead_code(graph)
    assert all(value_of(node) is not None for node in placeholders(graph))
