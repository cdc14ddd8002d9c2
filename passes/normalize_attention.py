"""`normalize_attention`: every attention core in one form, whatever it is made of.

    out = scaled_dot_product_attention(q, k, v, mask, scale=scale)
    p = q @ k.transpose(-1, -2); s = softcap * tanh(p * scale / softcap) + mask
    out = softmax(cat([s, sinks], -1), -1)[..., :-1] @ v
        -> AttentionCore(out, q, k, v, mask, scale, softcap, sinks)

Describes, and leaves the model's own operations where they are: a prompt's attention stays the model's. It may insert
the mask of the newest query (`passes/mask_row.py`), which `bind_cache` gives to the session.

What is spelt out (`attn_implementation="eager"`, bloom, mpt, gpt_oss, ...) is read strictly
(`passes/softmax_form.py`) and then proved on random numbers (`passes/prove_form.py`). What has no such form is noted
with the operation that stands in the way; if it reads a KV cache, `match_attention` refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from specache_fx.passes.base import AttentionCore, Pass, PassState
from specache_fx.passes.cache_side import LEAVE
from specache_fx.passes.graph_edit import call, finish
from specache_fx.passes.graph_slices import ancestors, constant_of
from specache_fx.passes.graph_utils import output_node, shape_of, source_of, target_name
from specache_fx.passes.mask_row import MaskRow
from specache_fx.passes.prove_form import differs, is_proved
from specache_fx.passes.score_ops import UnknownFormError, name_of, real_users
from specache_fx.passes.softmax_form import SoftmaxForm, read_form
from specache_fx.passes.write_log import WriteLog

_SDPA_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_LEAVE = f"{LEAVE}."


def sdpa_argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument of a call of `scaled_dot_product_attention`, by position or by name."""
    index = _SDPA_ARGS.index(name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def _from_sdpa(gm: GraphModule, node: Node) -> AttentionCore:
    query, key, value = (sdpa_argument(node, name) for name in _SDPA_ARGS[:3])
    given, problem = sdpa_argument(node, "scale"), None
    scale = None if given is None else constant_of(gm, given, node)
    dims, keys = shape_of(query) or (), shape_of(key) or ()
    if sdpa_argument(node, "dropout_p", 0.0) != 0.0:
        problem = ("it has dropout", "Call model.eval() first.")
    elif sdpa_argument(node, "is_causal", False) and len(dims) == 4 and dims[2] == 1 and keys[2] != 1:
        problem = ("it is causal with one query, which hides all keys but the first", _LEAVE)
    elif given is not None and scale is None:
        problem = (
            "its scale is computed in the graph",
            f"Multiply the queries by it instead, as a tensor. {_LEAVE}",
        )
    return AttentionCore(
        node=node,
        query=query,
        key=key,
        value=value,
        mask=sdpa_argument(node, "attn_mask"),
        scale=dims[-1] ** -0.5 if scale is None else scale,
        inner=frozenset({node}),
        problem=problem,
    )


def _from_softmax(gm: GraphModule, softmax: Node, outputs: set[Node], rows: MaskRow) -> AttentionCore:
    form = read_form(gm, softmax, outputs, rows)
    query = form.query
    if len(shape_of(query) or ()) == 3:
        with gm.graph.inserting_before(softmax):
            query = call(gm.graph, torch.unflatten, (query, 0, (-1, form.num_heads)), softmax)
        rows.inserted.append(query)
    core = AttentionCore(
        node=form.output,
        query=query,
        key=form.key,
        value=form.value,
        mask=form.mask,
        scale=form.scale,
        softcap=form.softcap,
        sinks=form.sinks,
        inner=frozenset(form.inner),
        problem=_read_elsewhere(form) or _written_meanwhile(form, rows.log),
    )
    if is_proved(core) and (reason := differs(gm, core)) is not None:
        raise UnknownFormError(softmax, f"was taken for an attention, but {reason}")
    return core


def _read_elsewhere(form: SoftmaxForm) -> tuple[str, str] | None:
    """Whether something else reads what will not be computed any more."""
    for node in form.inner - {form.output}:
        for user in real_users(node):
            if user not in form.inner:
                reason = f"`{user.name}` ({target_name(user)}) reads its `{node.name}`"
                returned = any(name_of(origin) == "softmax" for origin in ancestors([node]) & form.inner)
                return (
                    reason,
                    f"Call the model with output_attentions=False. {_LEAVE}" if returned else _LEAVE,
                )
    return None


def _written_meanwhile(form: SoftmaxForm, log: WriteLog) -> tuple[str, str] | None:
    """Whether something writes to what an attention reads before its output is there: it is read there and then."""
    for node in form.inner:
        for leaf in node.all_input_nodes:
            if leaf not in form.inner and (writes := log.between(leaf, node, form.output)):
                where = f"`{writes[0].name}` ({source_of(writes[0])})"
                return f"{where} may write to its `{leaf.name}` while it is computed", _LEAVE
    return None


def normalize_attention(gm: GraphModule, state: PassState) -> GraphModule:
    """Fill in `state.cores` and `state.unknown`."""
    if state.cores is not None:
        return gm
    state.cores, state.unknown = [], {}
    outputs = set(output_node(gm.graph).all_input_nodes)
    caches = any(len(shape_of(out) or ()) == 4 for out in outputs)
    rows = MaskRow(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            state.cores.append(_from_sdpa(gm, node))
        elif caches and node.op in ("call_function", "call_method") and target_name(node) == "softmax":
            before = len(rows.inserted)
            try:
                state.cores.append(_from_softmax(gm, node, outputs, rows))
            except UnknownFormError as unknown:
                rows.forget(before)
                state.unknown[node] = str(unknown)
    return finish(gm) if rows.inserted else gm


NORMALIZE_ATTENTION = Pass("normalize_attention", normalize_attention)
