"""KV caches that no attention in normal form reads: what to say of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from specache_fx.capture.caches.cache_side import returned_of
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    concatenated,
    described,
    hint_of,
    is_float,
    is_static_input,
    placeholders,
    reads_shape_only,
    real_users,
    shape_of,
    shown_shape,
    source_of,
    target_name,
)
from specache_fx.capture.graph.left_alone import BREAKS, LEAVE, sdpa_instead
from specache_fx.capture.program import Refusal
from specache_fx.runtime.ops import SDPA

CACHE_SO = (
    "Cache keys and values apart, each as [batch, num_kv_heads, kv_len, head_dim], for scaled_dot_product_attention; or"
    " latents that grow by cat as [batch, 1, kv_len, dim], and compute each head's keys and values from them"
)
_READERS = {"bmm", "mm", "mul", "dot"}


def _grew(out: Node, past: Node) -> bool:
    """Whether an output is an input with one more row: what a decode step returns of a cache."""
    size, before = ([*map(hint_of, shape_of(node) or ())] for node in (out, past))
    if len(size) != len(before) or len(size) < 3 or None in (*size, *before):
        return False
    more = [(now, old) for now, old in zip(size, before, strict=True) if now != old]
    return len(more) == 1 and more[0][0] == more[0][1] + 1 > 2 and past in ancestors([out])


def _grown(gm: GraphModule, outputs: set[Node]) -> list[Node]:
    """Caches in a form of their own: outputs that are inputs with one more row.

    There are two or more of them, or one of five dimensions, keys and values in one tensor.
    """
    pasts = [node for node in placeholders(gm.graph) if is_float(node, 5) and not is_static_input(node)]
    found = [out for out in gm.graph.nodes if out in outputs and is_float(out, 5)]
    found = [out for out in found if any(_grew(out, past) for past in pasts)]
    stacked = any(len(shape_of(out) or ()) == 5 for out in found)
    return found if len(found) > 1 or stacked else []


def _behind(roots: Sequence[Node], stop: Collection[Node] = ()) -> Iterator[Node]:
    """The nodes that are computed from some, the nearest first; not what is computed from `stop`."""
    work, seen = list(roots), set[Node]()
    while work:
        node = work.pop(0)
        if node in seen or reads_shape_only(node) or node.op == "output":
            continue
        yield node
        seen.add(node)
        work.extend(node.users if node not in stop else ())


def _is_inside(node: Node) -> bool:
    """Whether a node is the SDPA that another function of PyTorch calls, `multi_head_attention_forward`."""
    return target_name(node).startswith("_scaled_dot_product")


def _attention_behind(roots: Sequence[Node]) -> Node | None:
    """The first SDPA or softmax that is computed from some nodes."""
    found = (
        node
        for node in _behind(roots)
        if node.target is SDPA or target_name(node) == "_softmax" or _is_inside(node)
    )
    return next(found, None)


def reader_of(roots: Sequence[Node], them: str) -> str:
    """The attention that reads caches, as a clause; `them` stands for the caches."""
    reader = _attention_behind(roots)
    if reader is None:
        return f"no attention reads {them} here"
    return f"{described(reader)} reads {them} in another form"


def _grown_unread(out: Node) -> Refusal:
    """The message for a cache in a form of its own."""
    made_by = next(
        (node for node in out.all_input_nodes if isinstance(node.target, HigherOrderOperator)), None
    )
    if made_by is not None:
        reason = f"it runs inside `{target_name(made_by)}`, where specache does not look"
        remedy = f"Call the layers themselves (model.gradient_checkpointing_disable()). {LEAVE}."
    else:
        several = len(shape_of(out) or ()) > 4
        form = "keys and values, or several layers, in one tensor" if several else f"shape {shown_shape(out)}"
        reason, remedy = f"its cache has {form}, and {reader_of([out], 'it')}", f"{CACHE_SO}. {LEAVE}."
    return Refusal(out.name, source_of(out), reason, remedy)


def _appended_unread(root: Node) -> Refusal:
    """The message for a cache that grows as others do, and that no known attention reads."""
    if not real_users(root) or all(user.op == "output" for user in real_users(root)):
        reason = "nothing in this graph reads its cache (a graph break between its append and the attention?)"
        return Refusal(root.name, source_of(root), reason, BREAKS)
    reason = (
        "no attention that specache knows reads this cache (it knows SDPA and softmax of query times keys)"
    )
    sdpa = "torch.nn.functional.scaled_dot_product_attention"
    remedy = f"Use {sdpa} there if it can be. {LEAVE}."
    reader = _attention_behind([root])
    if reader is not None and _is_inside(reader):
        reason = "another function calls it (torch.nn.MultiheadAttention?)"
        remedy = f"Call {sdpa} itself, with the keys and values that are cached. {LEAVE}."
    else:
        reader = next((node for node in _behind([root]) if target_name(node) in _READERS), root)
    return Refusal(reader.name, source_of(reader), reason, remedy)


def unknown_forms(
    gm: GraphModule,
    known: set[Node],
    unknown: dict[Node, str],
    outputs: set[Node],
    *,
    refused: bool,
    matched: bool,
) -> list[Refusal]:
    """KV caches whose attention has no normal form: each named by the softmax that reads it first, or by itself.

    Args:
        gm: The graph.
        known: Outputs of attentions in normal form.
        unknown: Softmaxes of others, with the reason.
        outputs: What the graph returns.
        refused: An attention is refused already.
        matched: An attention is rewritten.
    """
    refusals: dict[str, Refusal] = {}
    silent: list[Refusal] = []
    for root in gm.graph.nodes:
        parts, dim = concatenated(root) or ([], 0)
        if not parts or returned_of(root, outputs) is None:
            continue
        behind = list(_behind([root], known))
        softmax = next((node for node in behind if node in unknown), None)
        if softmax is not None:
            refusal = Refusal(softmax.name, source_of(softmax), unknown[softmax], sdpa_instead(softmax))
            refusals.setdefault(softmax.name, refusal)
        elif dim == 2 and parts[0].op == "placeholder" and not is_static_input(parts[0]):
            # What is known is rewritten, or refused with a reason of its own.
            silent += [_appended_unread(root)] if known.isdisjoint(behind) else []
    if not refusals and not refused:  # else it may be the other side of an attention that is named
        refusals = {refusal.node: refusal for refusal in silent}
        if not refusals and not matched:
            return [_grown_unread(out) for out in _grown(gm, outputs)]
    return list(refusals.values())
