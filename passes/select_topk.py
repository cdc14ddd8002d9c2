"""`select_topk`: choose the KV pairs whose 16-bit originals are worth fetching.

    out, scores = specache.quantized_attention(q, k, v, None, state, layer, scale)
        -> out, scores = specache.quantized_attention(...)
           specache.append(...)
           indices = specache.topk(scores, state, layer, batch, num_kv_heads, top_k)

With lookahead "token" and "query" the choice is for the next step. With "none" it is for this one: a first attention
against the low-bit copy alone gives the scores, and the one that computes the output comes after the fetch.

Where several attentions share a layer there is one selection, by the scores of all of them (with "none" of the first).
Does nothing where the policy prefetches nothing, nor for a layer that is exact (a window, `resident_layers`): all of it
is on the device.
Paper: SpeCache Alg. 3, ArgTopK; "none" is Table 4's baseline.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.graph.graph_utils import value_of
from specache_fx.capture.program import Program
from specache_fx.passes.base import Pass

PROBE = "specache_probe"  # in the meta of an attention that runs for its scores alone


def attentions(gm: GraphModule) -> list[Node]:
    """The quantised attentions of a graph, probes too."""
    return [node for node in gm.graph.nodes if node.target is torch.ops.specache.quantized_attention.default]


@Pass
def select_topk(gm: GraphModule, program: Program) -> None:
    """Insert a selection for each attention."""
    if not program.config.stages:
        return
    graph = gm.graph
    for attention in attentions(gm):
        _, key, _, _, session, layer, *_ = attention.args
        if layer in program.exact_layers or any(
            node.target is torch.ops.specache.topk.default and node.args[2] == layer for node in graph.nodes
        ):
            continue
        append = torch.ops.specache.append.default
        appends = next(node for node in graph.nodes if node.target is append and node.args[3] == layer)
        is_for_this = program.config.lookahead == "none"
        # After the append, so that a group that this step quantises can be chosen for the next.
        with graph.inserting_before(attention if is_for_this else appends.next):
            source = attention
            if is_for_this:
                source = call(graph, attention.target, attention.args, attention, "probe")
                source.meta[PROBE] = True
            scores = call(graph, operator.getitem, (source, 1), attention, "scores")
            args = (scores, session, layer, *value_of(key).shape[1:3], program.config.top_k)
            call(graph, torch.ops.specache.topk.default, args, attention, "indices")
