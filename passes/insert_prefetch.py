"""`insert_prefetch`: start each transfer right after its selection, beside the device's next computation.

    indices = specache.topk(scores, ...)
        -> indices = specache.topk(scores, ...)
           specache.prefetch(indices, state, layer)

Paper: SpeCache Alg. 3, Pre-fetch.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass


@Pass
def insert_prefetch(gm: GraphModule, program: Program) -> None:
    """Insert a prefetch behind each selection that has none."""
    graph, ops = gm.graph, torch.ops.specache
    for topk in [node for node in graph.nodes if node.target is ops.topk.default]:
        if any(user.target is ops.prefetch.default for user in topk.users):
            continue
        with graph.inserting_after(topk):
            call(graph, ops.prefetch.default, (topk, topk.args[1], topk.args[2]), topk)
