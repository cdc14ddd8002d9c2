"""The masks of attentions, cut out of a decode graph before its cache is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from specache_fx.capture.graph_slices import ancestors, extract, mutated_inputs
from specache_fx.capture.graph_utils import (
    is_integer,
    is_static_input,
    placeholders,
    reads_shape_only,
    shape_of,
    symbols_of,
    value_of,
)
from specache_fx.capture.program import AttentionSite, LeaveAlone
from specache_fx.runtime.sources import Sources
from specache_fx.runtime.window_masks import WindowMasks


def with_masks(gm: GraphModule, sources: Sources, sites: Sequence[AttentionSite]) -> Sources:
    """With the masks of attentions to all tokens.

    Raises:
        LeaveAlone: If one is computed from something that can't be followed.
    """
    graph, roots, layers = _cut(gm, sources, [site for site in sites if site.keys.window is None])
    inputs = tuple(map(placeholders(gm.graph).index, roots))
    return replace(sources, mask_graph=graph, mask_inputs=inputs, layer_masks=layers) if graph else sources


def find_window_masks(
    gm: GraphModule, sources: Sources, sites: Sequence[AttentionSite]
) -> WindowMasks | None:
    """The masks of attentions over a window; None where there is no window.

    Raises:
        LeaveAlone: See `with_masks`.
    """
    windows = [site for site in sites if site.keys.window is not None]
    graph, roots, layers = _cut(gm, sources, windows)
    moves = not any(is_integer(node) and not symbols_of(value_of(node)) for node in roots)
    inputs = tuple(map(placeholders(gm.graph).index, roots))
    return WindowMasks(graph, inputs, layers, sources, moves) if windows else None


def _cut(
    gm: GraphModule, sources: Sources, sites: Sequence[AttentionSite]
) -> tuple[GraphModule | None, list[Node], dict[int, int]]:
    """The graph of the attentions' masks, None if there are none; its inputs, and the place of each layer's mask."""
    of_layers = {site.layer: site.core.mask for site in sites if site.core.mask is not None}
    masks = list(dict.fromkeys(of_layers.values()))
    if not masks:
        return None, [], {}
    inputs, needed = placeholders(gm.graph), ancestors(masks)
    roots = [node for node in inputs if node in needed]
    read = ancestors(masks, [node for node in needed if reads_shape_only(node)])  # not for its shape alone
    written = set(mutated_inputs(gm.graph))
    growing = {symbol for i in sources.shapes for symbol in symbols_of((shape_of(inputs[i]) or ())[2])}
    for node in roots:
        place = inputs.index(node)
        known = is_integer(node) or is_static_input(node) or place in sources.masks | sources.positions
        # Of what grows with the context only the caches' shapes are known ahead.
        grows = any(symbols_of(size) & growing for size in shape_of(node) or ())
        shape_only = node not in read and (place in sources.shapes or not grows)
        if node in written or not (known or shape_only):
            site = next(site for site in sites if site.core.mask is not None)
            raise LeaveAlone(
                f"the mask of `{site.core.node.name}` is computed from input `{node.name}`, which is neither a length,"
                " a position nor a mask over keys",
                "Pass a key padding mask of integers or booleans, [batch, kv_len], or compile this model with"
                ' backend="inductor".',
            )
    return extract(gm, masks, roots), roots, {layer: masks.index(mask) for layer, mask in of_layers.items()}
