"""The outputs of a graph: handles, logits, lengths, and what the rewritten graph still computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph.graph_slices import ancestors, cut_out
from specache_fx.capture.graph.graph_utils import (
    is_integer,
    is_static_input,
    placeholders,
    shape_of,
    value_of,
)
from specache_fx.capture.positions.newest_tokens import NEWEST_OF
from specache_fx.capture.program import AttentionSite, OutputPlan
from specache_fx.runtime.graph.sources import Sources

_NEVER_PREDICTED = 32  # rows of a table of embeddings, at most, that logits have no number for


def plan_outputs(
    gm: GraphModule, sites: Sequence[AttentionSite], sources: Sources | None
) -> tuple[OutputPlan, list[Node]]:
    """The plan for each output, and the nodes of those that the graph goes on computing.

    `sources` are the inputs of a decode graph; None for others.
    """
    outs = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    slots = {
        side.output: 2 * site.layer + i
        for site in sites
        if not site.shared
        for i, side in enumerate((site.keys, site.values))
    }
    constants = {i: out for i, out in enumerate(outs) if not isinstance(out, Node)}
    handles = {i: slots[out] for i, out in enumerate(outs) if i not in constants and out in slots}
    others = [i for i in range(len(outs)) if i not in constants and i not in handles]
    lengths = [
        i for i in others if sources is not None and (is_integer(outs[i]) or _tells_length(outs[i], sources))
    ]
    kept = [i for i in others if i not in lengths]
    plan = OutputPlan(
        handles=handles,
        kept=tuple(kept),
        lengths=tuple(lengths),
        length_part=cut_out(gm, [outs[i] for i in lengths]),
        constants=constants,
    )
    return plan, [outs[i] for i in kept]


def _tells_length(out: Node, sources: Sources) -> bool:
    """Whether an output that grows with the context is computed from what says where it is alone.

    That is lengths, positions, masks, and the ids of a whole sequence.
    """
    if not any(isinstance(size, torch.SymInt) for size in shape_of(out) or ()):
        return False
    moving, needed = sources.counts | sources.masks | sources.caches, ancestors([out])
    inputs = placeholders(out.graph)
    whole_ids = {node.meta.get(NEWEST_OF) for node in inputs}
    return all(
        i in moving or node in whole_ids or is_static_input(node) or is_integer(node)
        for i, node in enumerate(inputs)
        if node in needed
    )


def find_logits(kept: Sequence[Node], vocabulary: int | None) -> int | None:
    """The kept output with a number for every token of the vocabulary; the last one computed, if several.

    A table of embeddings may have some rows more, for tokens that are put in but never predicted (pictures). What is
    taken here decides what lane 1 speculates on, and no output.
    """
    if vocabulary is None or not kept:
        return None
    order = {node: i for i, node in enumerate(kept[0].graph.nodes)}
    found = [
        (shape[-1] == vocabulary, order[out], i)
        for i, out in enumerate(kept)
        if (shape := shape_of(out))
        and len(shape) in (2, 3)
        and isinstance(shape[-1], int)
        and vocabulary - min(_NEVER_PREDICTED, vocabulary // 10) <= shape[-1] <= vocabulary
        and value_of(out).is_floating_point()
    ]
    return max(found)[2] if found else None
