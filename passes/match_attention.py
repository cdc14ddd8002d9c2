"""`match_attention`: find the attentions over a growing KV cache, or say why one is none.

    keys   = cat([past_keys, k], -2)        # output; in prefill the past is empty, or there is no cat
    values = cat([past_values, v], -2)      # output
    AttentionCore(out, q, repeat_kv(keys), repeat_kv(values), mask, scale, softcap, sinks)
        -> AttentionSite(q, k, v, past_keys, past_values, keys, values, mask, scale, softcap, sinks)

A layer with a sliding window, or that attends within chunks, returns `keys[:, :, -window + 1 :]` as its cache instead:
a site with a `window`. Where several attentions read the same keys and values, the first one's cache is theirs
(`shared` sites).

Decides the graph's phase too: prefill has no past, decode has `q_len == 1` and a past, all else is an extend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.passes.base import AttentionCore, AttentionSite, Pass, PassState, Phase, Refusal
from specache_fx.passes.find_sources import find_token
from specache_fx.passes.graph_utils import (
    ancestors,
    base_of,
    grows,
    is_static_input,
    mutated_inputs,
    mutates,
    output_node,
    placeholders,
    reads_shape_only,
    shape_of,
    source_of,
    target_name,
    value_of,
)
from specache_fx.runtime.handle import unfit_reason

_RELAYOUTS = {"cat", "stack", "transpose", "permute", "contiguous", "view", "reshape", "clone", "unsqueeze"}
_MAKES_LIKE = {
    "new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like",
}  # fmt: skip
_LEAVE = 'To use this model nevertheless, compile it with backend="inductor"'


class _NoMatch(Exception):
    """Not a rewritable attention; `remedy` is "" where no user would expect one (no cache was asked for)."""

    def __init__(self, reason: str, remedy: str = f"{_LEAVE}.") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


@dataclass(frozen=True)
class _Side:
    """The keys or the values of one attention: what it reads, this call's part, the past, and what is returned."""

    root: Node
    new: Node
    past: Node | None
    output: Node
    window: int | None


def _without_repeat(node: Node) -> tuple[Node, list[Node]]:
    """Strip repeat_kv: `[:, :, None].expand(b, h, g, n, d).reshape(b, h * g, n, d)`, or repeat_interleave."""
    if target_name(node) == "repeat_interleave" and len(node.args) > 1 and isinstance(node.args[0], Node):
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if dim in (1, -3) and isinstance(node.args[1], int):
            return node.args[0], [node]
    chain = [node]
    for names in (("reshape", "view", "flatten"), ("expand",), ("getitem", "unsqueeze")):
        if target_name(chain[-1]) not in names or not isinstance(chain[-1].args[0], Node):
            return node, []
        chain.append(chain[-1].args[0])
    merged, expanded, inserted, root = (shape_of(step) for step in chain)
    if merged is None or expanded is None or inserted is None or root is None or len(root) != 4:
        return node, []
    is_repeat = (
        len(expanded) == 5
        and inserted == (*root[:2], 1, *root[2:])
        and expanded[:2] == root[:2]
        and merged == (root[0], root[1] * expanded[2], *root[2:])
    )
    return (chain[-1], chain[:-1]) if is_repeat else (node, [])


@dataclass(frozen=True)
class _Reader:
    """An attention that reads keys or values, and what leads from these to it (repeat_kv)."""

    core: AttentionCore
    repeat: tuple[Node, ...]

    @property
    def inside(self) -> set[Node]:
        """What reads the keys or values for it."""
        return {*self.core.inner, *self.repeat}


def _readers(cores: list[AttentionCore]) -> dict[Node, list[_Reader]]:
    """Who reads keys or values, by their root."""
    readers: dict[Node, list[_Reader]] = {}
    for core in cores:
        for side in (core.key, core.value):
            root, repeat = _without_repeat(side)
            readers.setdefault(root, []).append(_Reader(core, tuple(repeat)))
    return readers


def _newest(node: Node) -> int | None:
    """How many of the newest tokens a slice of keys keeps, `[:, :, -n:]`; None where it is another one."""
    index = node.args[1] if target_name(node) == "getitem" and len(node.args) > 1 else None
    if not isinstance(index, tuple) or not 3 <= len(index) <= 4:
        return None
    whole = slice(None)
    start = index[2].start if isinstance(index[2], slice) else None
    if not isinstance(start, int) or start >= 0 or index[2] != slice(start, None):
        return None
    return -start if all(part == whole for i, part in enumerate(index) if i != 2) else None


def _side(tensor: Node, what: str, outputs: set[Node], readers: dict[Node, list[_Reader]]) -> _Side:
    """Follow one side of an attention back to what is cached."""
    root, _ = _without_repeat(tensor)
    shape = shape_of(root)
    if shape is None or len(shape) != 4:
        raise _NoMatch(f"its {what} have shape {shape}, not [batch, num_kv_heads, kv_len, head_dim]")
    past: Node | None = None
    new = root
    if root.op == "call_function" and root.target is torch.cat:
        parts: Any = root.args[0]
        dim = root.args[1] if len(root.args) > 1 else root.kwargs.get("dim", 0)
        if isinstance(parts, (list, tuple)) and len(parts) == 2 and dim in (-2, 2):
            first, second = parts
            if first.op == "placeholder" and shape_of(first)[2] != 0:  # type: ignore[index]
                past, new = first, second
            elif first.op == "placeholder" or shape_of(first) == (0,):
                new = second
    kept = [user for user in root.users if user in outputs and target_name(user) == "getitem"]
    newest = _newest(kept[0]) if len(kept) == 1 and root not in outputs else None
    if root not in outputs and newest is None:
        if past is not None or any(target_name(user) == "getitem" and user in outputs for user in root.users):
            raise _NoMatch(
                f"neither its whole {what} nor the newest of them are what the model returns as its cache",
                f"Return cat([past, new], dim=-2) itself or its last tokens, [:, :, -n:]. {_LEAVE}.",
            )
        if _is_cached_elsewhere(root, outputs):
            raise _NoMatch(
                f"its {what} are cached, but not as a [batch, num_kv_heads, kv_len, head_dim] tensor that grows by cat"
                " and is returned as it is (another layout, a stack, a cache of fixed length?)",
                f"Return cat([past, new], dim=-2) itself, or use a DynamicCache. {_LEAVE}.",
            )
        if _is_made_from_cache(root, outputs, readers):
            raise _NoMatch(
                f"its {what} are no KV cache themselves, but computed anew in each step from what is cached (multi-head"
                " latent attention, MLA)"
            )
        raise _NoMatch(f"its {what} are not returned as a KV cache", "")
    output = root if newest is None else kept[0]
    inside = {output}.union(*(reader.inside for reader in readers[root]))
    for user in root.users:
        if user not in inside and user.op != "output" and not reads_shape_only(user):
            raise _NoMatch(f"its {what} are also used by `{user.name}` ({target_name(user)})")
    if past is not None:
        for user in past.users:
            if user is not root and not reads_shape_only(user):
                raise _NoMatch(f"its past {what} are also used by `{user.name}` ({target_name(user)})")
    return _Side(root, new, past, output, None if newest is None else newest + 1)


def _is_made_from_cache(root: Node, outputs: set[Node], readers: dict[Node, list[_Reader]]) -> bool:
    """Whether keys are computed from what grows with every token and is returned; not across an attention."""
    attentions = {reader.core.node for who in readers.values() for reader in who}
    return any(grows(node) for node in ancestors([root], stop=attentions) & outputs)


def _is_cached_elsewhere(root: Node, outputs: set[Node]) -> bool:
    """Whether keys that are no output are written into an input (a static cache) or returned in another form."""
    written = set(mutated_inputs(root.graph))
    if any(node in written for node in ancestors([root])):
        return True
    work, seen = [root, *root.all_input_nodes], set()
    while work:
        node = work.pop()
        if node in seen or len(shape_of(node) or ()) < 4:
            continue
        seen.add(node)
        if node in outputs:
            return True
        work.extend(user for user in node.users if target_name(user) in _RELAYOUTS)
    return False


def _comes_whole(core: AttentionCore) -> bool:
    """Whether keys are an input of the graph, and not just those of this call's tokens."""
    root, _ = _without_repeat(core.key)
    dims, queries = shape_of(root), shape_of(core.query)
    return (
        root.op == "placeholder"
        and not is_static_input(root)
        and dims is not None
        and queries is not None
        and len(dims) == 4
        and not statically_known_true(dims[2] == queries[2])
    )


def _match(
    core: AttentionCore,
    outputs: set[Node],
    readers: dict[Node, list[_Reader]],
    owners: dict[Node, AttentionSite],
) -> AttentionSite:
    if _comes_whole(core):
        raise _NoMatch(
            "its keys come into the graph whole, they are not appended to a past there (cross-attention, or a graph"
            " break between cat([past, new], dim=-2) and the attention)",
            f'TORCH_LOGS="graph_breaks" shows where graphs break. {_LEAVE}.',
        )
    keys, values = _side(core.key, "keys", outputs, readers), _side(core.value, "values", outputs, readers)
    owner = owners.get(keys.root)
    if owner is not owners.get(values.root):
        raise _NoMatch("its keys and its values are those of different caches")
    q, k, v = value_of(core.query), value_of(keys.root), value_of(values.root)
    if (keys.past is None) != (values.past is None):
        raise _NoMatch("only one of its keys and values has a past")
    if q.dim() != 4 or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise _NoMatch(f"its {q.shape[1]} query heads and {k.shape[1]} kv heads don't form groups")
    if keys.window != values.window:
        raise _NoMatch("its keys and its values are cached for different numbers of tokens")
    # Where others keep the pairs, the prompt's last queries alone may go on.
    if keys.past is None and owner is None and not statically_known_true(k.shape[2] == q.shape[2]):
        raise _NoMatch(
            "its keys are not those of this call alone, nor an append of them to a past that is an input"
            " (cross-attention, or a cache of fixed length?)",
            f"Such caches are not supported yet. {_LEAVE}.",
        )
    if keys.root is values.root:
        raise _NoMatch("its keys and values are one tensor")
    if k.dtype != v.dtype:
        raise _NoMatch(f"its keys are {k.dtype} and its values {v.dtype}")
    for side in (k, v):
        if reason := unfit_reason(side.dtype, side.shape[-1]):
            raise _NoMatch(reason)
    if core.problem is not None:
        raise _NoMatch(*core.problem)
    dims = shape_of(core.mask) if core.mask is not None else None
    if dims is not None and len(dims) > 4:
        raise _NoMatch(f"its mask has {len(dims)} dimensions")
    if dims is not None and len(dims) > 2 and dims[-3] != 1 and value_of(core.mask).dtype == torch.bool:
        raise _NoMatch("its mask hides other keys from head to head")
    if core.mask is not None and (data := _data_behind(core, keys, values)) is not None:
        raise _NoMatch(
            f"its mask is computed from data (`{data.name}`), not from positions and padding alone"
        )
    if owner is not None and keys.past is not None and q.shape[2] == 1 and core.mask is not owner.mask:
        raise _NoMatch(f"it reads the cache of attention `{owner.node.name}` with another mask")
    return AttentionSite(
        layer=len(owners) // 2 if owner is None else owner.layer,
        node=core.node,
        query=core.query,
        new_key=keys.new,
        new_value=values.new,
        past_key=keys.past,
        past_value=values.past,
        key_root=keys.root,
        value_root=values.root,
        key_output=keys.output,
        value_output=values.output,
        mask=core.mask,
        scale=core.scale,
        softcap=core.softcap,
        sinks=core.sinks,
        num_kv_heads=int(k.shape[1]),
        key_dim=int(k.shape[-1]),
        value_dim=int(v.shape[-1]),
        source=source_of(core.node),
        window=keys.window,
        shared=owner is not None,
    )


def _data_behind(core: AttentionCore, keys: _Side, values: _Side) -> Node | None:
    """What a mask reads, of tokens, embeddings, queries, keys and values; their shapes don't count."""
    assert core.mask is not None
    graph = core.mask.graph
    data = {core.query, keys.new, values.new, keys.past, values.past}
    token, vocabulary = find_token(graph)
    if any((shape_of(out) or (None,))[-1] == vocabulary for out in output_node(graph).all_input_nodes):
        data.add(token)
    data |= {
        node
        for node in placeholders(graph)
        if len(shape_of(node) or ()) == 3 and value_of(node).is_floating_point() and not is_static_input(node)
    }
    work, seen = [core.mask], set[Node]()
    while work:
        node = work.pop()
        if node in data:
            return node
        if node not in seen and not reads_shape_only(node) and target_name(node) not in _MAKES_LIKE:
            seen.add(node)
            work.extend(node.all_input_nodes)
    return None


def _phase(sites: list[AttentionSite]) -> Phase:
    if not sites:
        return Phase.NO_CACHE
    if sites[0].past_key is None:
        return Phase.PREFILL
    return Phase.DECODE if shape_of(sites[0].query)[2] == 1 else Phase.EXTEND  # type: ignore[index]


def match_attention(gm: GraphModule, state: PassState) -> GraphModule:
    """Fill in `state.sites`, `state.refusals` and `state.phase`. The graph stays as it is."""
    outputs = set(output_node(gm.graph).all_input_nodes)
    state.inputs = [node.name for node in placeholders(gm.graph)]
    state.sites, state.refusals = [], []
    cores = state.cores or []
    readers, owners = _readers(cores), dict[Node, AttentionSite]()
    for core in cores:
        try:
            site = _match(core, outputs, readers, owners)
            if state.sites and (site.past_key is None) != (state.sites[0].past_key is None):
                raise _NoMatch("it has a past and others in the graph have none, or the reverse")
            state.sites.append(site)
            for root in (site.key_root, site.value_root):
                owners.setdefault(root, site)
        except _NoMatch as no:
            if no.remedy:
                state.refusals.append(Refusal(core.node.name, source_of(core.node), no.reason, no.remedy))
    _drop_half_shared(state, readers)
    state.refusals.extend(_unknown_forms(gm, state, outputs))
    state.phase = _phase(state.sites)
    return gm


def _drop_half_shared(state: PassState, readers: dict[Node, list[_Reader]]) -> None:
    """Leave attentions alone whose cache is also read by one that is left alone: it would read handles."""
    matched = {site.node for site in state.sites}

    def stranger(site: AttentionSite) -> Node | None:
        both = readers[site.key_root] + readers[site.value_root]
        return next((reader.core.node for reader in both if reader.core.node not in matched), None)

    strangers = {site: stranger(site) for site in state.sites}
    for site, node in strangers.items():
        if node is not None:
            reason = f"its cache is also read by attention `{node.name}`, which is left alone"
            state.refusals.append(Refusal(site.node.name, site.source, reason, f"{_LEAVE}."))
    kept = [site for site in state.sites if strangers[site] is None]
    layers = {layer: i for i, layer in enumerate(dict.fromkeys(site.layer for site in kept))}
    state.sites = [replace(site, layer=layers[site.layer]) for site in kept]


def _appends_to_input(root: Node) -> bool:
    parts: Any = root.args[0]
    dim = root.args[1] if len(root.args) > 1 else root.kwargs.get("dim", 0)
    first = parts[0] if isinstance(parts, (list, tuple)) and parts else None
    return (
        dim in (-2, 2)
        and isinstance(first, Node)
        and first.op == "placeholder"
        and not is_static_input(first)
    )


def _unknown_forms(gm: GraphModule, state: PassState, outputs: set[Node]) -> list[Refusal]:
    """KV caches whose attention has no normal form: each named by the softmax that reads it first, or by itself."""
    known = {core.node for core in state.cores or []}
    refusals: dict[Node, Refusal] = {}
    silent: list[Node] = []
    for root in gm.graph.nodes:
        if root.target is not torch.cat or len(shape_of(root) or ()) != 4:
            continue
        if root not in outputs and not any(user in outputs and _newest(user) for user in root.users):
            continue
        work, seen = list(root.users), set[Node]()
        named = False
        while work:
            node = work.pop(0)
            if node in seen or reads_shape_only(node):
                continue
            if node in known:
                named = True  # rewritten, or refused with a reason of its own
                continue
            seen.add(node)
            if node not in state.unknown:
                work.extend(node.users)
                if mutates(node):  # read on under the name of what it was written into
                    work.extend(base_of(node.args[0]).users)
                continue
            remedy = f'Load it with attn_implementation="sdpa" if it can be. {_LEAVE}.'
            refusals.setdefault(node, Refusal(node.name, source_of(node), state.unknown[node], remedy))
            named = True
            break
        if not named and _appends_to_input(root):
            silent.append(root)
    if not refusals and not state.refusals:  # else it may be the other side of an attention that is named
        reason = "no attention that specache knows reads this cache (it knows SDPA and softmax of query times keys)"
        remedy = f"Use torch.nn.functional.scaled_dot_product_attention there. {_LEAVE}."
        refusals = {root: Refusal(root.name, source_of(root), reason, remedy) for root in silent}
    return list(refusals.values())


MATCH_ATTENTION = Pass("match_attention", match_attention)
