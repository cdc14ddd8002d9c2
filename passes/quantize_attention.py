"""`quantize_attention`: attention markers become attention over the quantised cache, and an append.

    out = specache.attention(q, k, v, scale)
        -> out, scores = specache.quantized_attention(q, k, v, None, state, layer, scale)
           specache.append(k[0], v[0], state, layer)

Only the output token's pair (lane 0) is appended; see `NextAnswer` for the speculative one's. A marker without lanes
gets a lane dimension of 1. Where several attentions share a layer, the last one appends.
A layer that is exact (`Program.exact_layers`) gets the same ops; what the passes after this one insert, it does
without.
`None` is the place of the pairs that `insert_waits` will bring.
Paper: SpeCache eq. 1 and Alg. 3.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule

from specache_fx.capture.graph.graph_edit import add_placeholder, call
from specache_fx.capture.graph.graph_utils import shape_of
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass
from specache_fx.passes.bind_cache import STATE
from specache_fx.runtime.steps.step_table import empty_state


@Pass
def quantize_attention(gm: GraphModule, program: Program) -> None:
    """Replace the markers; adds the `state` input where there is one."""
    graph, ops, aten = gm.graph, torch.ops.specache, torch.ops.aten
    markers = graph.find_nodes(op="call_function", target=ops.attention.default)
    if not markers:
        return
    last = {site.layer: site for site in program.sites}
    session = add_placeholder(graph, STATE, empty_state(len(program.owners)))
    for i, (site, marker) in enumerate(zip(program.sites, markers, strict=True)):
        query, key, value, *form = marker.args  # scale, and softcap and sinks where there are any
        if site.expansion is not None:
            form.insert(3, i)
        has_lanes = len(shape_of(query) or ()) == 5
        with graph.inserting_before(marker):
            if not has_lanes:
                query, key, value = (
                    call(graph, aten.unsqueeze.default, (side, 0), marker) for side in (query, key, value)
                )
            args = (query, key, value, None, session, site.layer, *form)
            attention = call(graph, ops.quantized_attention.default, args, marker, "attention")
            out = call(graph, operator.getitem, (attention, 0), marker, "out")
            if not has_lanes:
                out = call(graph, aten.select.int, (out, 0, 0), marker)
            # Other readers of this layer have their own lane's pair, not a stored one.
            if last[site.layer] is site:
                own = [
                    call(graph, aten.select.int, (side, 0, 0), marker, name)
                    for side, name in ((key, "new_key"), (value, "new_value"))
                ]
                call(graph, ops.append.default, (*own, session, site.layer), marker)
        marker.replace_all_uses_with(out)
        graph.erase_node(marker)
