"""The masks of attentions, cut out of a graph before its cache is.

A decode graph's are evaluated in each step. A prompt's may be tested before they are made: `passes/prompt_masks.py`
puts the tests in. Those that weights or random numbers go into, and those of attentions that are spelt out, are made as
the model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.capture.graph.graph_edit import call, finish
from specache_fx.capture.graph.graph_slices import ancestors, cut_out, draws_random_numbers, mutated_inputs
from specache_fx.capture.graph.graph_utils import (
    is_integer,
    is_static_input,
    placeholders,
    reads_shape_only,
    shape_of,
    symbols_of,
    value_of,
)
from specache_fx.capture.graph.left_alone import LeaveAlone
from specache_fx.capture.program import AttentionSite
from specache_fx.runtime.graph.graph_part import Part
from specache_fx.runtime.graph.sources import PositionalPart, Sources
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten


def find_masks(
    gm: GraphModule, sources: Sources, sites: Sequence[AttentionSite], *, of_windows: bool
) -> PositionalPart:
    """The newest query's rows of the masks of attentions over a window, or of those to all tokens.

    Raises:
        LeaveAlone: If one is computed from something that can't be followed.
    """
    of_layers = {
        site.layer: site.core.mask
        for site in sites
        if site.core.mask is not None and (site.keys.window is not None) == of_windows
    }
    masks = list(dict.fromkeys(of_layers.values()))
    _check_inputs(gm, sources, sites, masks)
    part = cut_out(gm, masks)
    output: Any = part.graph.graph.output_node()
    with part.graph.graph.inserting_before(output):
        output.args = (tuple(map(_newest_row, output.args[0])),)
    finish(part.graph)
    roots = [placeholders(gm.graph)[i] for i in part.inputs]
    moves = not any(is_integer(node) and not symbols_of(value_of(node)) for node in roots)
    layers = {layer: masks.index(mask) for layer, mask in of_layers.items()}
    return PositionalPart(part, part, sources, layers, moves or not of_windows)


def _newest_row(mask: Node) -> Node:
    dims = len(shape_of(mask) or ())
    return call(mask.graph, _aten.select.int, (mask, -2, -1), mask) if dims > 1 else mask


def _check_inputs(
    gm: GraphModule, sources: Sources, sites: Sequence[AttentionSite], masks: Sequence[Node]
) -> None:
    """Raise where masks are computed from something that can't be moved on by a token."""
    inputs, needed = placeholders(gm.graph), ancestors(masks)
    read = ancestors(masks, [node for node in needed if reads_shape_only(node)])  # not for its shape alone
    written = set(mutated_inputs(gm.graph))
    counts = {inputs[i] for i in sources.counts}
    growing = {symbol for i in sources.caches for symbol in symbols_of((shape_of(inputs[i]) or ())[2])}
    for place, node in enumerate(inputs):
        known = is_integer(node) or is_static_input(node) or place in sources.masks or node in counts
        # Of what grows with the context only the caches' shapes are known ahead.
        grows = any(symbols_of(size) & growing for size in shape_of(node) or ())
        shape_only = node not in read and (place in sources.caches or not grows)
        if node in needed and (node in written or not (known or shape_only or _is_table(node, counts))):
            site = next(site for site in sites if site.core.mask and node in ancestors([site.core.mask]))
            raise LeaveAlone(
                f"the mask of `{site.core.node.name}` is computed from input `{node.name}`, which is neither a length,"
                " a position nor a mask over keys",
                "Pass a key padding mask of integers or booleans, [batch, kv_len], or compile this model with"
                ' backend="inductor".',
            )


def _is_table(node: Node, positions: set[Node]) -> bool:
    """Whether all that is read of an input are rows picked by position: a causal mask of all positions, perhaps."""
    readers = [user for user in node.users if not reads_shape_only(user)]
    return bool(readers) and all(
        _is_table(user, positions)
        if user.target is _aten.unsqueeze.default
        else user.target is _aten.index.Tensor
        and user.args[0] is node
        and bool(ancestors(user.all_input_nodes[1:]) & positions)
        for user in readers
    )


def find_prompt_masks(
    gm: GraphModule, sites: Sequence[AttentionSite]
) -> tuple[tuple[Part, ...], dict[Node, int]]:
    """Masks of a graph of several tokens that may follow a rule, and by attention's output the place of its mask."""
    found: list[Part] = []
    places: dict[tuple[Node, int | None], int] = {}
    rules: dict[Node, int] = {}
    # A mask computed from cached pairs can't be evaluated apart from the graph.
    changed = {*mutated_inputs(gm.graph)}
    changed |= {
        root for site in sites if site.keys.past is not None for root in (site.keys.root, site.values.root)
    }
    for site in sites:
        mask = site.core.mask
        if mask is None or not _may_follow_rule(site, mask):
            continue
        key = (mask, site.keys.window)
        if key not in places:
            needed = ancestors([mask])
            weighs = any(is_static_input(node) and value_of(node).dim() > 0 for node in needed)
            if weighs or any(map(draws_random_numbers, needed)) or needed & changed:
                continue
            places[key] = len(found)
            found.append(cut_out(gm, [mask]))
        rules[site.core.node] = places[key]
    return tuple(found), rules


def _may_follow_rule(site: AttentionSite, mask: Node) -> bool:
    """Whether it masks each query's keys for all heads the same way, in an operator that knows causal attention."""
    shape, query = shape_of(mask) or (), shape_of(site.core.query) or ()
    if site.core.node.target is not SDPA or len(shape) < 2 or len(query) != 4:
        return False
    q_len, kv_len = query[2], value_of(site.core.node.args[1]).shape[2]
    of_all = statically_known_true(shape[-2] == q_len) and statically_known_true(shape[-1] == kv_len)
    shared = len(shape) < 3 or statically_known_true(shape[-3] == 1)
    known = statically_known_true(kv_len >= q_len) and not statically_known_true(q_len == 1)
    return of_all and shared and known
