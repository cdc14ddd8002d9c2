"""The reading of a KV cache by an attention: the cached tensors themselves, or results of them.

keys, values are cached                         -> read as they are
keys, values = expand(latent, k_rot)            -> latent and k_rot are cached (multi-head latent attention)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from specache_fx.capture.caches.cache_side import is_cache, why_not_cached, without_repeat
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    reads_shape_only,
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
        core: The attention.
        key: Its keys without repeat_kv.
        value: Its values.
        key_cache: What is cached, and keys are computed from: `key` itself where that is cached.
        value_cache: What is cached, and values are computed from; of two latents the one that they need.
        inside: What leads from the caches to the attention's output, that included.
    """

    core: AttentionCore
    key: Node
    value: Node
    key_cache: Node
    value_cache: Node
    inside: frozenset[Node]

    @property
    def is_expanded(self) -> bool:
        """Whether keys or values are computed from what is cached."""
        return (self.key, self.value) != (self.key_cache, self.value_cache)


def readings_of(
    gm: GraphModule, cores: Sequence[AttentionCore], outputs: set[Node]
) -> dict[Node, Reading | LeaveAlone]:
    """The reading of each attention, by its node; or the reason for none that could be followed."""
    caches = {node for node in gm.graph.nodes if is_cache(node, outputs)}
    attentions = {core.node for core in cores}
    found: dict[Node, Reading | LeaveAlone] = {}
    for core in cores:
        (key, key_repeat), (value, value_repeat) = without_repeat(core.key), without_repeat(core.value)
        inside = {*core.inner, *key_repeat, *value_repeat}
        if key in caches and value in caches:
            found[core.node] = Reading(core, key, value, key, value, frozenset(inside))
            continue
        try:
            pair, between = _behind(gm, core, (key, value), caches, attentions, outputs)
            found[core.node] = Reading(core, key, value, *pair, frozenset(inside | between))
        except LeaveAlone as no:
            found[core.node] = no
    return found


def _behind(
    gm: GraphModule,
    core: AttentionCore,
    sides: tuple[Node, Node],
    caches: set[Node],
    attentions: set[Node],
    outputs: set[Node],
) -> tuple[tuple[Node, Node], set[Node]]:
    """The two cached tensors that keys and values are computed from, and the nodes in between."""
    key, value = sides
    stops = caches | attentions
    needed = ancestors(sides, stops)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    cached = sorted(needed & caches, key=order.__getitem__)
    made = "its keys and values are computed in each step from"
    cached = [node for node in cached if any(_same_tokens(node, side) for side in sides)]
    if not cached:
        side, what = (key, "keys") if key not in caches else (value, "values")
        raise why_not_cached(side, what, outputs)
    if len(cached) != 2:
        names = ", ".join(f"`{node.name}`" for node in cached)
        raise LeaveAlone(f"{made} what is cached ({names}), which is not a pair of tensors")
    if more := needed & attentions:
        raise LeaveAlone(f"{made} what is cached and from another attention (`{more.pop().name}`)")
    between = _made_from(cached, needed)
    for node in between:
        # It may be all there is of a prompt, and fewer of what comes after it: a window over a cache that keeps more.
        if target_name(node) == "slice" and len(shape_of(node) or ()) == 4 and node.args[1] in (2, -2):
            raise LeaveAlone(
                f"it reads some of the tokens that are cached (`{node.name}`, {source_of(node)})"
            )
    for_value = ancestors([value], stops)
    latent = next((node for node in cached if node in for_value), cached[1])
    rest = next(node for node in cached if node is not latent)
    if rest in for_value:  # both are needed for both: as the model returns them
        rest, latent = cached
    return (rest, latent), between


def _made_from(caches: list[Node], needed: set[Node]) -> set[Node]:
    """The nodes among `needed` whose numbers come from the caches; not what computes a shape."""
    made, work = set[Node](), list(caches)
    while work:
        node = work.pop()
        more = [user for user in node.users if user in needed and not reads_shape_only(user)]
        work.extend(user for user in more if user not in made)
        made.update(more)
    return made


def _same_tokens(cache: Node, side: Node) -> bool:
    """Whether a cache has a row for each row of keys or values."""
    one, other = shape_of(cache) or (), shape_of(side) or ()
    return len(one) == len(other) == 4 and same_sizes(one[2:3], other[2:3])


def check_between(reading: Reading, inside: set[Node]) -> None:
    """Make sure that nothing but attentions needs what is computed from the cache.

    Raises:
        LeaveAlone: Names what does.
    """
    for node in reading.inside - reading.core.inner:
        for user in node.users:
            if user not in inside and not reads_shape_only(user):
                raise LeaveAlone(f"`{user.name}` ({target_name(user)}) reads its `{node.name}` too")
