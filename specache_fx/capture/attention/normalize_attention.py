"""SDPA in the normal form of an attention.

    out = specache.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale)
        -> AttentionCore(out, q, k, v, mask, scale)

Spelt-out attention (`attn_implementation="eager"`, bloom, mpt, gpt_oss, ...) is understood by running it
(`capture/attention/run_form.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.attention.run_form import in_groups, is_of_one_token, with_heads
from specache_fx.capture.graph.graph_edit import CallsOnce
from specache_fx.capture.graph.graph_slices import constant_of
from specache_fx.capture.graph.graph_utils import same_sizes, shape_of
from specache_fx.capture.graph.left_alone import LEAVE
from specache_fx.capture.program import AttentionCore

_aten = torch.ops.aten
_LEAVE = f"{LEAVE}."


def from_sdpa(gm: GraphModule, node: Node, calls: CallsOnce) -> AttentionCore:
    """The attention that an operator computes."""
    args: Any = node.args
    query, key, value, mask, dropout, causal, given, _ = args
    problem = None
    scale = None if given is None else constant_of(gm, given)
    dims, keys = shape_of(query) or (), shape_of(key) or ()
    if not causal and _has_heads_as_rows(node):
        query, mask = _with_heads_apart(node, calls)
    if dropout != 0.0:
        problem = ("it has dropout", "Call model.eval() first.")
    elif causal and len(dims) == 4 and dims[2] == 1 and keys[2] != 1:
        problem = ("it is causal with one query, which hides all keys but the first", _LEAVE)
    elif given is not None and scale is None:
        problem = (
            "its scale is computed in the graph",
            f"Multiply the queries by it instead, as a tensor. {_LEAVE}",
        )
    core = AttentionCore(
        node=node,
        query=query,
        key=key,
        value=value,
        mask=mask,
        scale=dims[-1] ** -0.5 if scale is None else scale,
        inner=frozenset({node}),
        problem=problem,
    )
    return in_groups(core, calls)


def _has_heads_as_rows(node: Node) -> bool:
    """Whether a token's query heads are the rows of one query of each KV head, `[batch, num_kv_heads, groups, dim]`."""
    query, keys = (shape_of(side) or () for side in node.args[:2])
    groups = query[1:3]
    rows = len(query) == len(keys) == 4 and all(isinstance(size, int) for size in groups) and groups[1] > 1
    return rows and keys[1] == groups[0] and not same_sizes(keys[1:3], groups) and is_of_one_token(node.graph)


def _with_heads_apart(node: Node, calls: CallsOnce) -> tuple[Node, Node | None]:
    """Query and mask of such an attention as those of one token."""
    args: Any = node.args
    query, mask = args[0], args[3]
    _, kv_heads, groups, dim = shape_of(query) or ()
    if isinstance(mask, Node) and mask.target is _aten.expand.default:  # it may be a row, repeated
        source: Any = mask.args[0]
        mask = source if (shape_of(source) or ())[-2:-1] == (1,) else mask
    if isinstance(mask, Node):
        mask = with_heads(mask, (kv_heads, groups), True, calls, node)
    return calls.call(node, _aten.reshape.default, query, [-1, kv_heads * groups, 1, dim]), mask
