"""`flex_attention`, the higher-order operator, in the normal form of an attention.

    out = flex_attention(q, k, v, score_mod, (..., mask_mod), scale)[0]
        -> out = SDPA(q, k, v, mask, scale)                                 # score_mod changes nothing
        -> s = score_mod(q @ k^T * scale, b, h, i, j)                       # in float32
           softmax(where(mask, s, -inf)) @ v                                # read and proved: `run_form.py`

Mods are of one place, `b`, `h`, `i`, `j`. `torch.vmap` runs them at all places at once, as torch does where it does not
compile the operator. So `mask` is `mask_mod(b, h, i, j)`. A list of blocks says no more than the `mask_mod` that it was
made from. Without a `mask_mod` it says more, and the attention stays.

With a `score_mod` the operator stays in prompts. Its meaning is inserted before it, and replaces it in decode steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as FLEX
from torch.fx import GraphModule, Node

from specache_fx.capture.attention.random_numbers import repeated
from specache_fx.capture.attention.run_form import from_softmax
from specache_fx.capture.graph.graph_edit import CallsOnce, call, finish
from specache_fx.capture.graph.graph_slices import constant_of
from specache_fx.capture.graph.graph_utils import same_sizes, shape_of, unexpanded
from specache_fx.capture.graph.left_alone import LeaveAlone
from specache_fx.capture.graph.trace import inline
from specache_fx.capture.program import AttentionCore
from specache_fx.errors import first_line
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
_NO_BLOCKS = 1 << 30  # the block size of a mask that nobody gave


def is_flex(node: Node) -> bool:
    """Whether a node is the operator."""
    return node.target is FLEX


def masks_alone_as_sdpa(gm: GraphModule) -> GraphModule:
    """Make SDPA of flex attentions that only mask, in place; others stay."""
    calls = CallsOnce()
    for flex in [node for node in gm.graph.nodes if is_flex(node) and not _changes_scores(gm, node)]:
        try:
            out, mask, scale = _parts(gm, flex, calls)
        except LeaveAlone:
            continue
        with gm.graph.inserting_before(flex):
            args = (*flex.args[:3], mask, 0.0, False, scale, True)
            out.replace_all_uses_with(call(gm.graph, SDPA, args, flex))
        for node in (*flex.users, flex):
            gm.graph.erase_node(node)
    return finish(gm)


def from_flex(gm: GraphModule, flex: Node, outputs: set[Node], calls: CallsOnce) -> AttentionCore:
    """The attention that the operator computes. What it means is inserted before it.

    Args:
        gm: The graph.
        flex: The operator.
        outputs: See `from_softmax`.
        calls: See `from_softmax`.

    Raises:
        LeaveAlone: If its mods can't be followed, or its `score_mod` has no normal form.
    """
    out, mask, scale = _parts(gm, flex, calls)
    args: Any = flex.args
    query, key, value, score_mod, *_, score_reads, _ = args
    spelt = partial(_spelt_out, score_mod=_graph(gm, score_mod), scale=scale)
    node = _inserted(calls, spelt, (query, key, value, mask, *score_reads), flex)
    while node.target is not _aten._softmax.default:
        node = node.all_input_nodes[0]
    core = from_softmax(gm, node, outputs, calls)
    return replace(core, node=out, key=key, value=value, inner=frozenset({flex, out}))


def _parts(gm: GraphModule, flex: Node, calls: CallsOnce) -> tuple[Node, Node | None, float]:
    """Output, mask and scale. The mask, up to `[batch, num_heads, q_len, kv_len]`, is inserted before the operator."""
    args: Any = flex.args
    query, key, _, _, blocks, scale, _, _, mask_reads = args
    if any(user.args[1] != 0 and user.users for user in flex.users):
        raise LeaveAlone("its log-sum-exp or its largest scores are read")
    if not same_sizes((shape_of(query) or ())[:1], (shape_of(key) or ())[:1]):
        raise LeaveAlone("its queries and its keys are of other batches")
    if (scale := constant_of(gm, scale)) is None:
        raise LeaveAlone("its scale is computed in the graph")
    out = next(user for user in flex.users if user.target is operator.getitem and user.args[1] == 0)
    mask_mod, mask = _graph(gm, blocks[-1]), None
    if _result(mask_mod).target is not _aten.new_ones.default:
        mask = _inserted(calls, partial(_mask, mask_mod=mask_mod), (query, key, *mask_reads), flex)
    elif blocks[-2] != _NO_BLOCKS:
        raise LeaveAlone("its block mask has no mask_mod, so that blocks alone say which keys are hidden")
    return out, unexpanded(mask), scale


def _graph(gm: GraphModule, mod: Any) -> GraphModule:
    return getattr(gm, mod.target)


def _result(mod: GraphModule) -> Node:
    return mod.graph.output_node().all_input_nodes[0]


def _changes_scores(gm: GraphModule, flex: Node) -> bool:
    """Whether its `score_mod` returns more than the score as it came."""
    score_mod = _graph(gm, flex.args[3])
    return _result(score_mod) is not next(iter(score_mod.graph.nodes))


def _inserted(calls: CallsOnce, function: Callable[..., Any], operands: tuple[Any, ...], flex: Node) -> Node:
    try:
        return inline(function, operands, flex, calls)
    except Exception as error:  # of any operator of a mod
        raise LeaveAlone(f"its mods can't be run at all places at once ({first_line(error)})") from error


def _at_all_places(mod: Callable[..., Any], query: Tensor, key: Tensor, scores: Any, reads: Any) -> Tensor:
    """What a mod returns at each place, `[batch, num_heads, q_len, kv_len]`."""
    sizes = (*query.shape[:3], key.shape[2])
    for dim in reversed(range(4)):
        places = (0 if each == dim else None for each in range(4))
        mod = torch.vmap(mod, in_dims=(*[0] * len(scores), *places, *[None] * len(reads)))
    out: Tensor = mod(*scores, *(torch.arange(size, device=query.device) for size in sizes), *reads)
    return out


def _mask(query: Tensor, key: Tensor, *reads: Any, mask_mod: GraphModule) -> Tensor:
    return _at_all_places(mask_mod, query, key, (), reads)


def _spelt_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, *reads: Any, score_mod: GraphModule, scale: float
) -> Tensor:
    """Scores are in float32 at least, as the operator has them."""
    wide = torch.promote_types(query.dtype, torch.float32)
    every = repeated(key, query.shape[1]).to(wide)
    scores = (query.to(wide) @ every.transpose(-1, -2)) * scale
    scores = _at_all_places(score_mod, query, key, (scores,), reads)
    scores = scores if mask is None else torch.where(mask, scores, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ repeated(value, query.shape[1])
