"""Find the attentions over a growing KV cache, or say why one is none.

    keys   = cat([past_keys, k], -2)        # output; in prefill the past is empty, or there is no cat
    values = cat([past_values, v], -2)      # output
    AttentionCore(out, q, repeat_kv(keys), repeat_kv(values), mask, scale, softcap, sinks)
        -> AttentionSite(core, Side(keys, k, past_keys), Side(values, v, past_values))

A layer with a sliding window, or that attends within chunks, returns `keys[:, :, -window + 1 :]` as its cache instead:
a site with a `window`. Keys and values may also be computed from what is cached (`capture/caches/expansion.py`:
MLA). Where several attentions read the same cache, it is the first one's (`shared` sites).

Decides the graph's phase too: prefill has no past, decode has `q_len == 1` and a past, all else is an extend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.capture.caches.cache_side import other_reader, side_of, without_repeat
from specache_fx.capture.caches.expansion import find_expansion
from specache_fx.capture.caches.reading import Reading, readings_of
from specache_fx.capture.caches.unknown_forms import unknown_forms
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    hint_of,
    is_float,
    is_static_input,
    placeholders,
    reads_shape_only,
    same_sizes,
    shape_of,
    source_of,
    target_name,
    value_of,
)
from specache_fx.capture.graph.left_alone import BREAKS, GROW, LEAVE, LeaveAlone
from specache_fx.capture.positions.find_token import Token
from specache_fx.capture.program import AttentionCore, AttentionSite, Phase, Refusal, Side
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.handles.handle import unfit_reason
from specache_fx.runtime.layers.layout import LayerShape


def _comes_whole(core: AttentionCore) -> bool:
    """Whether keys are an input of the graph, and not just those of this call's tokens."""
    cache: Any = without_repeat(core.key)
    cache = cache.args[0] if cache.target is torch.ops.aten.transpose.int else cache  # whichever are swapped
    return (
        cache.op == "placeholder"
        and not is_static_input(cache)
        and len(shape_of(cache) or ()) == 4
        and not statically_known_true(value_of(core.key).shape[2] == value_of(core.query).shape[2])
    )


def _match(
    gm: GraphModule,
    reading: Reading,
    outputs: set[Node],
    readers: dict[Node, list[Reading]],
    owners: dict[Node, AttentionSite],
    token: Token,
) -> AttentionSite:
    core = reading.core
    inside = {
        node
        for cache in (reading.key_cache, reading.value_cache)
        for reader in readers[cache]
        for node in reader.inside
    }
    keys = side_of(reading.key_cache, "keys", outputs, inside)
    values = side_of(reading.value_cache, "values", outputs, inside)
    owner = owners.get(keys.root)
    _check_cache(reading, keys, values, owners, token)
    if core.problem is not None:
        raise LeaveAlone(*core.problem)
    _check_mask(core, keys, values, token)
    one_query = value_of(core.query).shape[2] == 1
    if owner is not None and keys.past is not None and one_query and core.mask is not owner.core.mask:
        raise LeaveAlone(f"it reads the cache of attention `{owner.core.node.name}` with another mask")
    for node in reading.inside - core.inner:
        if (user := other_reader(node, inside)) is not None:
            raise LeaveAlone(f"`{user.name}` ({target_name(user)}) reads its `{node.name}` too")
    k, v = (value_of(side.root).shape for side in (keys, values))
    return AttentionSite(
        layer=len(owners) // 2 if owner is None else owner.layer,
        core=replace(core, scale=float(core.scale)),  # a symbol where head_dim is open (dynamic=True)
        keys=keys,
        values=values,
        shape=LayerShape(int(k[1]), int(k[-1]), int(v[-1]), keys.window),
        shared=owner is not None,
        expansion=find_expansion(gm, reading) if reading.is_expanded else None,
    )


def _check_cache(
    reading: Reading, keys: Side, values: Side, owners: dict[Node, AttentionSite], token: Token
) -> None:
    """Make sure that keys and values are one cache of this call's sequence, which a session can keep."""
    core, owner = reading.core, owners.get(keys.root)
    if owner is not owners.get(values.root):
        raise LeaveAlone("its keys and its values are those of different caches")
    if owner is not None and (keys.root, values.root) != (owner.keys.root, owner.values.root):
        raise LeaveAlone(f"it reads as values what attention `{owner.core.node.name}` reads as keys")
    if (keys.past is None) != (values.past is None):
        raise LeaveAlone("only one of its keys and values has a past")
    k, v = value_of(keys.root), value_of(values.root)
    _check_heads(reading)
    if keys.window != values.window:
        raise LeaveAlone("its keys and its values are cached for different numbers of tokens")
    # Where others keep the pairs, the prompt's last queries alone may go on.
    if keys.past is None and owner is None and not _is_of_these_tokens(core, k, token):
        raise LeaveAlone(
            "its keys are not those of this call alone, nor an append of them to a past that is an input"
            " (cross-attention, or a cache of fixed length?)",
            f"Write into a cache of fixed length in place (index_copy_). Or {GROW}. {LEAVE}.",
        )
    if keys.past is None and owner is None and _is_of_another_sequence(core, keys, token):
        raise LeaveAlone("its keys are computed from another sequence than its queries (cross-attention)")
    if keys.root is values.root:
        raise LeaveAlone("its keys and values are one tensor")
    if (other := _of_other_tokens(keys, owners)) is not None:
        raise LeaveAlone(f"its cache is not of the same tokens as that of attention `{other.core.node.name}`")
    if k.dtype != v.dtype:
        raise LeaveAlone(f"its keys are {k.dtype} and its values {v.dtype}")
    for side in (k, v):
        if reason := unfit_reason(side.dtype, side.shape[-1]):
            raise LeaveAlone(reason)


def _is_of_these_tokens(core: AttentionCore, key: torch.Tensor, token: Token) -> bool:
    """Whether there is a query for each key, or one for each query head of its group."""
    query = value_of(core.query)
    rows, tokens = query.shape[2], key.shape[2]
    if statically_known_true(rows == tokens):
        return True
    if query.shape[1] != key.shape[1] or token.node is None:
        return False  # keys of another sequence can't be told from those of fewer heads without token ids
    now = [hint_of(size) for size in (rows, tokens)]
    return all(now) and statically_known_true(rows == tokens * (now[0] // now[1]))


def _is_of_another_sequence(core: AttentionCore, keys: Side, token: Token) -> bool:
    """Whether queries are computed from this call's tokens and keys are not, which may be as many."""
    return token.node in ancestors([core.query]) and token.node not in ancestors([keys.new])


def _of_other_tokens(keys: Side, owners: dict[Node, AttentionSite]) -> AttentionSite | None:
    """An attention whose cache has another length, now or before: a session has one for all."""
    for site in owners.values():
        if not statically_known_true(value_of(keys.new).shape[2] == value_of(site.keys.new).shape[2]):
            return site
        whole = keys.window is None and site.keys.window is None
        if whole and keys.past is not None and site.keys.past is not None:
            # Dynamo has a symbol for each: as they are in the call that it traces.
            now = [value_of(past).shape[2] for past in (keys.past, site.keys.past)]
            if len({*map(hint_of, now)}) > 1:
                return site
    return None


def _check_heads(reading: Reading) -> None:
    q, k, v = (value_of(node) for node in (reading.core.query, reading.core.key, reading.core.value))
    if q.dim() != 4:
        raise LeaveAlone(f"its queries have {q.dim()} dimensions, not [batch, num_heads, q_len, head_dim]")
    for side in map(value_of, (reading.key_cache, reading.value_cache, reading.core.key)):
        if statically_known_true(q.shape[0] != side.shape[0]):
            remedy = f"Cache them expanded to the queries' batch. {LEAVE}."
            raise LeaveAlone(
                f"its queries are a batch of {q.shape[0]}, its keys or values one of {side.shape[0]}", remedy
            )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        heads = f"{q.shape[1]} query heads, {k.shape[1]} heads of keys and {v.shape[1]} of values"
        raise LeaveAlone(f"its {heads} don't form groups")
    cached = [value_of(node).shape[1] for node in (reading.key_cache, reading.value_cache)]
    if cached[0] != cached[1] or k.shape[1] % cached[0]:
        raise LeaveAlone(
            f"its cache has {cached[0]} heads of keys and {cached[1]} of values, which are no groups of the"
            f" {k.shape[1]} heads that are computed from them"
        )


def _check_mask(core: AttentionCore, keys: Side, values: Side, token: Token) -> None:
    dims = shape_of(core.mask) if core.mask is not None else None
    if dims is not None and len(dims) > 4:
        raise LeaveAlone(f"its mask has {len(dims)} dimensions")
    if dims is not None and len(dims) > 2 and dims[-3] != 1 and value_of(core.mask).dtype == torch.bool:
        one_mask = "Give it one mask for all heads, [batch, 1, q_len, kv_len]"
        raise LeaveAlone(
            f"its mask has {dims[-3]} heads, and may hide other keys from head to head",
            f"{one_mask}. {LEAVE}.",
        )
    if core.mask is not None and (data := _data_behind(core, keys, values, token)) is not None:
        where = f", {line}" if (line := source_of(core.mask)) and line != source_of(core.node) else ""
        raise LeaveAlone(
            f"its mask (`{core.mask.name}`{where}) is computed from data (`{data.name}`), not from positions and"
            " padding alone",
            f"If `{data.name}` is a mask, give it as booleans or integers. {LEAVE}."
            if data.op == "placeholder" and len(shape_of(data) or ()) == 3 and is_float(data)
            else f"{LEAVE}.",
        )


def _data_behind(core: AttentionCore, keys: Side, values: Side, token: Token) -> Node | None:
    """A token input, embedding, query, key or value that a mask reads; their shapes don't count."""
    assert core.mask is not None
    graph = core.mask.graph
    returns_logits = any(
        (shape_of(out) or (None,))[-1] == token.vocabulary for out in graph.output_node().all_input_nodes
    )
    read = (core.query, keys.new, values.new, keys.past, values.past, token.node if returns_logits else None)
    data = {node for node in read if node is not None}
    data |= {
        node
        for node in placeholders(graph)
        if len(shape_of(node) or ()) == 3 and value_of(node).is_floating_point() and not is_static_input(node)
    }
    shapes = {node for node in graph.nodes if reads_shape_only(node)}
    needed = ancestors([core.mask], shapes | data)
    return next((node for node in graph.nodes if node in needed & data), None)


def phase_of(sites: Sequence[AttentionSite]) -> Phase:
    """The use that a graph with these attentions makes of the KV cache."""
    if sites[0].keys.past is None:
        return Phase.PREFILL
    tokens = (node for site in sites for node in (site.core.query, site.keys.new))
    return Phase.DECODE if all(same_sizes(shape_of(node)[2:3], (1,)) for node in tokens) else Phase.EXTEND  # type: ignore[index]


def match_attention(
    gm: GraphModule,
    cores: Sequence[AttentionCore],
    unknown: dict[Node, str],
    config: SpecacheConfig,
    token: Token,
) -> tuple[list[AttentionSite], list[Refusal]]:
    """The attentions that are rewritten, and those that are not; `cores` and `unknown` are from `attention_cores`."""
    outputs = set(gm.graph.output_node().all_input_nodes)
    sites: list[AttentionSite] = []
    refusals: list[Refusal] = []
    readings = readings_of(gm, cores, outputs)
    readers, owners = dict[Node, list[Reading]](), dict[Node, AttentionSite]()
    for reading in readings.values():
        if isinstance(reading, Reading):
            for cache in (reading.key_cache, reading.value_cache):
                readers.setdefault(cache, []).append(reading)
    for core in cores:
        try:
            if 0 in (shape_of(core.query) or ()):
                raise LeaveAlone("this call has no tokens or no sequences", "Make no call without tokens.")
            if _comes_whole(core):
                raise LeaveAlone(
                    "its keys come into the graph whole, they are not appended to a past there (cross-attention, or a"
                    " graph break between cat([past, new], dim=-2) and the attention)",
                    BREAKS,
                )
            reading = readings[core.node]
            if isinstance(reading, LeaveAlone):
                raise reading
            site = _match(gm, reading, outputs, readers, owners, token)
            if sites and (site.keys.past is None) != (sites[0].keys.past is None):
                raise LeaveAlone("it has a past and others in the graph have none, or the reverse")
            if site.expansion is not None and site.keys.window is None and not config.placement.codes:
                raise LeaveAlone(
                    f"its keys and values are computed from what is cached (latent attention), and policy"
                    f" {config.policy!r} has only a part of that on the device",
                    'Use policy="specache" or "kivi".',
                )
            sites.append(site)
            for root in (site.keys.root, site.values.root):
                owners.setdefault(root, site)
        except LeaveAlone as no:
            if no.remedy:
                refusals.append(Refusal(core.node.name, source_of(core.node), no.reason, no.remedy))
    sites, half_shared = _drop_half_shared(sites, readers)
    refusals += half_shared
    known = {core.node for core in cores}
    refusals += unknown_forms(gm, known, unknown, outputs, refused=bool(refusals), matched=bool(sites))
    return sites, refusals


def _drop_half_shared(
    sites: Sequence[AttentionSite], readers: dict[Node, list[Reading]]
) -> tuple[list[AttentionSite], list[Refusal]]:
    """Leave attentions alone whose cache is also read by one that is left alone: it would read handles."""
    matched = {site.core.node for site in sites}
    kept: list[AttentionSite] = []
    refusals: list[Refusal] = []
    for site in sites:
        both = readers[site.keys.root] + readers[site.values.root]
        other = next((reader.core.node for reader in both if reader.core.node not in matched), None)
        if other is None:
            kept.append(site)
        else:
            reason = f"its cache is also read by attention `{other.name}`, which is left alone"
            refusals.append(Refusal(site.core.node.name, site.source, reason, f"{LEAVE}."))
    layers = {layer: i for i, layer in enumerate(dict.fromkeys(site.layer for site in kept))}
    return [replace(site, layer=layers[site.layer]) for site in kept], refusals
