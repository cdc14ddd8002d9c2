"""`insert_waits`: order every read of prefetched pairs behind their arrival.

    out, scores = specache.quantized_attention(q, k, v, None, state, layer, scale)
        -> staged = specache.wait_prefetch(state, layer)
           out, scores = specache.quantized_attention(q, k, v, staged, state, layer, scale)

Right before the attention: as late as can be, so that the transfer has all the compute in front of it to hide behind.
The prefetch itself was started one step before (in the same step with lookahead "none").
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass
from specache_fx.passes.select_topk import PROBE, attentions


@Pass
def insert_waits(gm: GraphModule, program: Program) -> None:
    """Give each attention that may read staged pairs its wait; one of an exact layer reads none."""
    if not program.config.stages:
        return
    graph = gm.graph
    for attention in attentions(gm):
        if attention.args[3] is not None or attention.meta.get(PROBE):
            continue
        session, layer = attention.args[4], attention.args[5]
        if layer in program.exact_layers:
            continue
        with graph.inserting_before(attention):
            staged = call(
                graph, torch.ops.specache.wait_prefetch.default, (session, layer), attention, "staged"
            )
        attention.update_arg(3, staged)
