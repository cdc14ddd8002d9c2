"""Every attention core in one form, whatever it is made of.

    out = specache.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale)
    p = bmm(q, transpose(k, -1, -2)); s = softcap * tanh(p * scale / softcap) + mask
    out = bmm(slice(_softmax(cat([s, sinks], -1), -1), -1, 0, -1), v)
        -> AttentionCore(out, q, k, v, mask, scale, softcap, sinks)

Describes, and leaves the model's own operations where they are: a prompt's attention stays the model's, but for that
over buffers of fixed length (`capture/buffer_reads.py`). It may insert the mask of the newest query, which
`bind_cache` gives to the session.

Spelt-out attention (`attn_implementation="eager"`, bloom, mpt, gpt_oss, ...) is understood by running it
(`capture/run_form.py`). An attention without such a form is noted with the operation
that stands in the way; if it reads a KV cache, `match_attention` refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.cache_side import LEAVE, LeaveAlone
from specache_fx.capture.graph_edit import finish
from specache_fx.capture.graph_slices import ancestors, constant_of
from specache_fx.capture.graph_utils import described, real_users, shape_of, target_name
from specache_fx.capture.mask_rows import MaskRowBuilder, UnknownFormError
from specache_fx.capture.program import AttentionCore
from specache_fx.capture.random_numbers import Numbers
from specache_fx.capture.run_form import read_form
from specache_fx.runtime import ops  # noqa: F401  (registers torch.ops.specache)

SDPA = torch.ops.specache.scaled_dot_product_attention.default
SDPA_DEFAULTS = (None, 0.0, False, None, False)  # of the arguments behind query, key and value
_SDPA_ARGS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_LEAVE = f"{LEAVE}."
# Scores of a prompt's proof, at most; a decode step's is always made. Of a longer prompt the parts are read alone: its
# attention stays the model's.
MOST_SCORES = 2**20
MOST_REPLACED = 2**23  # the same, where a prompt's operations are replaced


def sdpa_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of `SDPA`, of those of `torch.nn.functional.scaled_dot_product_attention`."""
    given = {**dict(zip(_SDPA_ARGS, args, strict=False)), **kwargs}
    rest = zip(_SDPA_ARGS[3:], SDPA_DEFAULTS, strict=True)
    return *(given[name] for name in _SDPA_ARGS[:3]), *(given.get(name, by) for name, by in rest)


def from_sdpa(gm: GraphModule, node: Node) -> AttentionCore:
    """The attention that an operator computes."""
    args: Any = node.args
    query, key, value, mask, dropout, causal, given, _ = args
    problem = None
    scale = None if given is None else constant_of(gm, given)
    dims, keys = shape_of(query) or (), shape_of(key) or ()
    if dropout != 0.0:
        problem = ("it has dropout", "Call model.eval() first.")
    elif causal and len(dims) == 4 and dims[2] == 1 and keys[2] != 1:
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
        mask=mask,
        scale=dims[-1] ** -0.5 if scale is None else scale,
        inner=frozenset({node}),
        problem=problem,
    )


def from_softmax(gm: GraphModule, softmax: Node, outputs: set[Node], rows: MaskRowBuilder) -> AttentionCore:
    """The attention around a softmax, read and proved; see `read_form`.

    Args:
        gm: The graph.
        softmax: The softmax.
        outputs: See `read_form`.
        rows: See `read_form`. Of all queries where a prompt's operations are replaced too, so that it needs its proof.

    Raises:
        UnknownFormError: If it has no normal form.
        LeaveAlone: If a prompt that is to be replaced is too long for its proof.
    """
    sizes = shape_of(softmax) or ()
    proved = _num_scores(softmax) <= (MOST_SCORES if rows.newest else MOST_REPLACED) or sizes[-2:-1] == (1,)
    if not (proved or rows.newest):
        many = f"has more than 2^{MOST_REPLACED.bit_length() - 1} scores in this prompt, too many to prove its form"
        raise LeaveAlone(
            f"{described(softmax)} {many}",
            f"Give the prompt in pieces, or use scaled_dot_product_attention. {LEAVE}.",
        )
    # `match_attention` refuses a call without tokens; nothing is there to be proved.
    core = read_form(gm, softmax, outputs, rows, proved=proved and 0 not in sizes)
    return replace(core, problem=_read_elsewhere(core))


def _num_scores(softmax: Node) -> int:
    """Scores of an attention, open sizes given small values."""
    numbers = Numbers(softmax)
    return math.prod(numbers.integer(size) for size in shape_of(softmax) or ())


def _read_elsewhere(core: AttentionCore) -> tuple[str, str] | None:
    """Whether something else reads what is computed from the keys or the values: handles have no numbers."""
    cached = {core.key, core.value}
    for node in core.node.graph.nodes:
        if node in core.inner and not cached.isdisjoint(node.all_input_nodes):
            cached.add(node)
    for node in cached & core.inner - {core.node}:
        for user in real_users(node):
            if user not in core.inner:
                returned = any(target_name(origin) == "_softmax" for origin in ancestors([node]) & core.inner)
                remedy = "Call the model with output_attentions=False. " if returned else ""
                return f"{described(user)} reads its `{node.name}`", f"{remedy}{_LEAVE}"
    return None


def attention_cores(gm: GraphModule) -> tuple[list[AttentionCore], dict[Node, str]]:
    """The attentions of a graph in normal form, and the softmaxes around which none was found, with the reason."""
    cores: list[AttentionCore] = []
    unknown: dict[Node, str] = {}
    outputs = set(gm.graph.output_node().all_input_nodes)
    caches = any(len(shape_of(out) or ()) == 4 for out in outputs)
    rows = MaskRowBuilder()
    for node in list(gm.graph.nodes):
        if node.target is SDPA:
            cores.append(from_sdpa(gm, node))
        elif caches and node.target is torch.ops.aten._softmax.default:
            try:
                cores.append(from_softmax(gm, node, outputs, rows))
            except UnknownFormError as error:
                unknown[node] = str(error)
    if rows.erase_unused(ancestors(node for core in cores for node in (core.query, core.mask) if node)):
        finish(gm)
    return cores, unknown
