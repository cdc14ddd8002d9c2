"""`split_prelude`: nodes that depend on positions and lengths alone leave the decode graph.

    cos = f(position_ids); out = g(token, cos)   ->   out = g(token, specache_prelude_0)

`capture/positions/find_prelude.py` has cut it out (`Decoding.prelude`). Runs after `bind_cache`, on decode graphs.
"""

from __future__ import annotations

from torch.fx import GraphModule

from specache_fx.capture.graph.graph_slices import eliminate_dead_code
from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass


@Pass
def split_prelude(gm: GraphModule, program: Program) -> None:
    """Cut the graph where position-only tensors enter the rest."""
    graph, inputs = gm.graph, placeholders(gm.graph)
    if program.decoding is None or any("specache_prelude" in node.meta for node in inputs):
        return
    for i, node in enumerate(program.decoding.boundary):
        with graph.inserting_after(inputs[-1]):
            entry = graph.placeholder(f"specache_prelude_{i}")
        entry.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        entry.meta["specache_prelude"] = i
        node.replace_all_uses_with(entry)
        inputs.append(entry)
    for node in reversed(program.decoding.asserts):
        graph.erase_node(node)
    eliminate_dead_code(graph)
    for node in placeholders(graph):
        if not node.users:
            graph.erase_node(node)
