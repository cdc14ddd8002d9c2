"""The masks of attentions over a window, cut out of a decode graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from specache_fx.capture.find_sources import mask_inputs
from specache_fx.capture.graph_slices import extract
from specache_fx.capture.graph_utils import is_integer, placeholders, symbols_of, value_of
from specache_fx.capture.program import AttentionSite
from specache_fx.runtime.sources import Sources
from specache_fx.runtime.window_masks import WindowMasks


def find_window_masks(
    gm: GraphModule, sources: Sources, sites: Sequence[AttentionSite]
) -> WindowMasks | None:
    """Cut the masks of the windows out of a decode graph, before the cache is taken out of it.

    Raises:
        LeaveAlone: If a mask is computed from something that can't be followed.
    """
    windows = [site for site in sites if site.window is not None]
    if not windows:
        return None
    masked = [site for site in windows if site.mask is not None]
    masks: list[Node] = list(dict.fromkeys(site.mask for site in masked if site.mask is not None))
    if not masks:
        return WindowMasks(None, (), {}, sources, True)
    roots = mask_inputs(gm, masks, sources, masked[0])
    index = {node: i for i, node in enumerate(placeholders(gm.graph))}
    return WindowMasks(
        graph=extract(gm, masks, roots),
        inputs=tuple(index[node] for node in roots),
        layers={site.layer: masks.index(site.mask) for site in masked if site.mask is not None},
        sources=sources,
        moves=not any(is_integer(node) and not symbols_of(value_of(node)) for node in roots),
    )
