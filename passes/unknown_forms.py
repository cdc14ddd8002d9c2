"""KV caches that no attention in normal form reads: what to say of them."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from specache_fx.passes.base import PassState, Refusal
from specache_fx.passes.cache_side import LEAVE, is_cache
from specache_fx.passes.graph_utils import concatenated, is_static_input, reads_shape_only, source_of
from specache_fx.passes.writes import storages, written_storages


def _appends_to_input(root: Node) -> bool:
    parts, dim = concatenated(root) or ([], 0)
    return dim == 2 and bool(parts) and parts[0].op == "placeholder" and not is_static_input(parts[0])


def unknown_forms(gm: GraphModule, state: PassState, outputs: set[Node]) -> list[Refusal]:
    """KV caches whose attention has no normal form: each named by the softmax that reads it first, or by itself."""
    known = {core.node for core in state.cores or []}
    refusals: dict[Node, Refusal] = {}
    silent: list[Node] = []
    for root in gm.graph.nodes:
        if concatenated(root) is None or not is_cache(root, outputs):
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
                if changed := written_storages(node):  # read on under other names of what it was written into
                    same = [other for other in gm.graph.nodes if storages(other) & changed]
                    work.extend(user for other in same for user in other.users)
                continue
            remedy = f'Load it with attn_implementation="sdpa" if it can be. {LEAVE}.'
            refusals.setdefault(node, Refusal(node.name, source_of(node), state.unknown[node], remedy))
            named = True
            break
        if not named and _appends_to_input(root):
            silent.append(root)
    if not refusals and not state.refusals:  # else it may be the other side of an attention that is named
        reason = "no attention that specache knows reads this cache (it knows SDPA and softmax of query times keys)"
        remedy = f"Use torch.nn.functional.scaled_dot_product_attention there. {LEAVE}."
        refusals = {root: Refusal(root.name, source_of(root), reason, remedy) for root in silent}
    return list(refusals.values())
