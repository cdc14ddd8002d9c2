"""The reading of a KV cache by an attention: the cached tensors themselves, or results of them.

keys, values are cached                         -> read as they are
keys, values = expand(latent, k_rot)            -> latent and k_rot are cached (multi-head latent attention)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from specache_fx.capture.caches.cache_side import returned_of, why_not_cached, without_repeat
from specache_fx.capture.graph.graph_slices import ancestors, between
from specache_fx.capture.graph.graph_utils import (
    same_sizes,
    shape_of,
    source_of,
    target_name,
)
from specache_fx.capture.graph.left_alone import LeaveAlone
from specache_fx.capture.program import AttentionCore


@dataclass(frozen=True)
class Reading:
    """One attention's way to its cache.

    Attributes:
        core: The attention, with keys and values without repeat_kv.
        key_cache: What is cached, and keys are computed from: these themselves where they are cached.
        value_cache: What is cached, and values are computed from; of two latents the one that they need.
        inside: What leads from the caches to the attention's output, that included.
    """

    core: AttentionCore
    key_cache: Node
    value_cache: Node
    inside: frozenset[Node]

    @property
    def is_expanded(self) -> bool:
        """Whether keys or values are computed from what is cached."""
        return (self.core.key, self.core.value) != (self.key_cache, self.value_cache)


def readings_of(
    gm: GraphModule, cores: Sequence[AttentionCore], outputs: set[Node]
) -> dict[Node, Reading | LeaveAlone]:
    """The reading of each attention, by its node; or the reason for none that could be followed.

    Args:
        gm: The graph.
        cores: Its attentions.
        outputs: What it returns.
    """
    order = [node for node in gm.graph.nodes if returned_of(node, outputs) is not None]
    stops = {*order, *(core.node for core in cores)}
    found: dict[Node, Reading | LeaveAlone] = {}
    for core in cores:
        try:
            found[core.node] = _reading_of(core, order, stops, outputs)
        except LeaveAlone as no:
            found[core.node] = no
    return found


def _reading_of(core: AttentionCore, caches: Sequence[Node], stops: set[Node], outputs: set[Node]) -> Reading:
    """The reading of an attention from caches, in the graph's order; the way to these ends at `stops`."""
    operands = core.key, core.value
    core = replace(core, key=without_repeat(core.key), value=without_repeat(core.value))
    sides = core.key, core.value
    if all(side in caches for side in sides):
        return Reading(core, *sides, core.inner | {*between(sides, operands, stops)}.difference(sides))
    needed = ancestors(sides, stops)
    made = "its keys and values are computed in each step from"
    cached = [node for node in caches if node in needed and any(_same_tokens(node, side) for side in sides)]
    if not cached:
        side, what = (core.key, "keys") if core.key not in caches else (core.value, "values")
        raise why_not_cached(side, what, outputs)
    if len(cached) != 2:
        names = ", ".join(f"`{node.name}`" for node in cached)
        raise LeaveAlone(f"{made} what is cached ({names}), which is not a pair of tensors")
    if more := (needed & stops).difference(caches):
        raise LeaveAlone(f"{made} what is cached and from another attention (`{more.pop().name}`)")
    made_from = {*between(cached, operands, stops)}.difference(cached)
    for node in made_from:
        # It may be all there is of a prompt, and fewer of what comes after it: a window over a cache that keeps more.
        if target_name(node) == "slice" and len(shape_of(node) or ()) == 4 and node.args[1] in (2, -2):
            raise LeaveAlone(
                f"it reads some of the tokens that are cached (`{node.name}`, {source_of(node)})"
            )
    for_value = ancestors([core.value], stops)
    latent = next((node for node in cached if node in for_value), cached[1])
    rest = next(node for node in cached if node is not latent)
    if rest in for_value:  # both are needed for both: as the model returns them
        rest, latent = cached
    return Reading(core, rest, latent, core.inner | made_from)


def _same_tokens(cache: Node, side: Node) -> bool:
    """Whether a cache has a row for each row of keys or values."""
    one, other = shape_of(cache) or (), shape_of(side) or ()
    return len(one) == len(other) == 4 and same_sizes(one[2:3], other[2:3])
