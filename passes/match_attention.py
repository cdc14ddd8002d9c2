"""`match_attention`: find the attentions over a growing KV cache, or say why one is none.

    keys   = cat([past_keys, k], -2)        # output; in prefill the past is empty, or there is no cat
    values = cat([past_values, v], -2)      # output
    out    = scaled_dot_product_attention(q, repeat_kv(keys), repeat_kv(values), mask)
        -> AttentionSite(q, k, v, past_keys, past_values, keys, values, mask, scale)

A layer with a sliding window, or that attends within chunks, returns `keys[:, :, -window + 1 :]` as its cache instead:
a site with a `window`. Where several attentions read the same keys and values, the first one's cache is theirs
(`shared` sites).

Decides the graph's phase too: prefill has no past, decode has `q_len == 1` and a past, all else is an extend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.passes.base import AttentionSite, Pass, PassState, Phase, Refusal
from specache_fx.passes.graph_utils import (
    ancestors,
    mutated_inputs,
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
_SDPA_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
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


def _argument(node: Node, name: str, default: Any = None) -> Any:
    index = _SDPA_ARGS.index(name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


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


def _readers(gm: GraphModule) -> dict[Node, set[Node]]:
    """What leads from keys or values to the attentions that read them, by their root; the attentions included."""
    readers: dict[Node, set[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            for name in _SDPA_ARGS[1:3]:
                root, repeat = _without_repeat(_argument(node, name))
                readers.setdefault(root, set()).update((node, *repeat))
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


def _side(tensor: Node, what: str, outputs: set[Node], readers: dict[Node, set[Node]]) -> _Side:
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
        raise _NoMatch(f"its {what} are not returned as a KV cache", "")
    output = root if newest is None else kept[0]
    inside = {output, *readers[root]}
    for user in root.users:
        if user not in inside and user.op != "output" and not reads_shape_only(user):
            raise _NoMatch(f"its {what} are also used by `{user.name}` ({target_name(user)})")
    if past is not None:
        for user in past.users:
            if user is not root and not reads_shape_only(user):
                raise _NoMatch(f"its past {what} are also used by `{user.name}` ({target_name(user)})")
    return _Side(root, new, past, output, None if newest is None else newest + 1)


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


def _match(
    node: Node, outputs: set[Node], readers: dict[Node, set[Node]], owners: dict[Node, AttentionSite]
) -> AttentionSite:
    query, key, value = (_argument(node, name) for name in _SDPA_ARGS[:3])
    keys, values = _side(key, "keys", outputs, readers), _side(value, "values", outputs, readers)
    owner = owners.get(keys.root)
    if owner is not owners.get(values.root):
        raise _NoMatch("its keys and its values are those of different caches")
    q, k, v = value_of(query), value_of(keys.root), value_of(values.root)
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
    if _argument(node, "dropout_p", 0.0) != 0.0:
        raise _NoMatch("it has dropout", "Call model.eval() first.")
    mask = _argument(node, "attn_mask")
    dims = shape_of(mask) if mask is not None else None
    if dims is not None and (len(dims) not in (2, 3, 4) or (len(dims) > 2 and dims[-3] != 1)):
        raise _NoMatch("its mask differs from head to head")
    decode = keys.past is not None and q.shape[2] == 1
    if decode and _argument(node, "is_causal", False):
        raise _NoMatch("it is causal with one query, which hides all keys but the first")
    scale = _argument(node, "scale")
    if scale is not None and not isinstance(scale, (int, float)):
        raise _NoMatch("its scale is computed in the graph")
    return AttentionSite(
        layer=len(owners) // 2 if owner is None else owner.layer,
        node=node,
        query=query,
        new_key=keys.new,
        new_value=values.new,
        past_key=keys.past,
        past_value=values.past,
        key_root=keys.root,
        value_root=values.root,
        key_output=keys.output,
        value_output=values.output,
        mask=mask,
        scale=float(scale) if scale is not None else q.shape[-1] ** -0.5,
        num_kv_heads=int(k.shape[1]),
        key_dim=int(k.shape[-1]),
        value_dim=int(v.shape[-1]),
        source=source_of(node),
        window=keys.window,
        shared=owner is not None,
    )


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
    readers, owners = _readers(gm), dict[Node, AttentionSite]()
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
            continue
        try:
            site = _match(node, outputs, readers, owners)
            if state.sites and (site.past_key is None) != (state.sites[0].past_key is None):
                raise _NoMatch("it has a past and others in the graph have none, or the reverse")
            state.sites.append(site)
            for root in (site.key_root, site.value_root):
                owners.setdefault(root, site)
        except _NoMatch as no:
            if no.remedy:
                state.refusals.append(Refusal(node.name, source_of(node), no.reason, no.remedy))
    _drop_half_shared(state, readers)
    state.refusals.extend(_appends_without_sdpa(gm, state, outputs))
    state.phase = _phase(state.sites)
    return gm


def _drop_half_shared(state: PassState, readers: dict[Node, set[Node]]) -> None:
    """Leave attentions alone whose cache is also read by one that is left alone: it would read handles."""
    matched = {site.node for site in state.sites}

    def stranger(site: AttentionSite) -> Node | None:
        both = readers[site.key_root] | readers[site.value_root]
        sdpa = (node for node in both if node.target is F.scaled_dot_product_attention)
        return next((node for node in sdpa if node not in matched), None)

    strangers = {site: stranger(site) for site in state.sites}
    for site, node in strangers.items():
        if node is not None:
            reason = f"its cache is also read by attention `{node.name}`, which is left alone"
            state.refusals.append(Refusal(site.node.name, site.source, reason, f"{_LEAVE}."))
    kept = [site for site in state.sites if strangers[site] is None]
    layers = {layer: i for i, layer in enumerate(dict.fromkeys(site.layer for site in kept))}
    state.sites = [replace(site, layer=layers[site.layer]) for site in kept]


def _appends_without_sdpa(gm: GraphModule, state: PassState, outputs: set[Node]) -> list[Refusal]:
    """KV caches whose attention is no SDPA call: named once a graph, by the softmax that reads them."""
    bound = {root for site in state.sites for root in (site.key_root, site.value_root)}
    grown = [
        node
        for node in gm.graph.nodes
        if node.target is torch.cat
        and node in outputs
        and node not in bound
        and len(shape_of(node) or ()) == 4
    ]
    softmax = [node for node in gm.graph.nodes if target_name(node) == "softmax"]
    if not grown or not softmax:
        return []
    return [
        Refusal(
            softmax[0].name,
            source_of(softmax[0]),
            "it is computed by matmul and softmax, not by scaled_dot_product_attention",
            'Load the model with attn_implementation="sdpa" (model.set_attn_implementation("sdpa")).',
        )
    ]


MATCH_ATTENTION = Pass("match_attention", match_attention)
