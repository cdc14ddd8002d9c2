"""`flex_attention`, the higher-order operator, in the normal form of an attention.

    out = flex_attention(q, k, v, score_mod, (..., mask_mod), scale)[0]
        -> AttentionCore(out, q, k, v, mask, scale)                         # score_mod changes nothing
        -> s = score_mod(q @ k^T * scale, b, h, i, j)                       # in float32
           softmax(where(mask, s, -inf)) @ v                                # read and proved: `run_form.py`

`mask` is `mask_mod(b, h, i, j)`. A list of blocks says no more than the `mask_mod` that it was
made from. Without a `mask_mod` it says more, and the attention stays.

The operator stays in the graph until its attention is rewritten. With a mask alone it becomes SDPA then, whose prompts
know rules of masks. With a `score_mod` it stays in prompts: it keeps no scores in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as FLEX
from torch.fx import GraphModule, Node

from specache_fx.capture.attention.random_numbers import repeated
from specache_fx.capture.attention.run_form import from_softmax
from specache_fx.capture.graph.graph_edit import CallsOnce, call, copy_graph, finish
from specache_fx.capture.graph.graph_slices import constant_of, draws_random_numbers
from specache_fx.capture.graph.graph_utils import (
    described,
    is_pointwise,
    reads_shape_only,
    same_sizes,
    shape_of,
    value_of,
)
from specache_fx.capture.graph.left_alone import LeaveAlone
from specache_fx.capture.graph.trace import inline
from specache_fx.capture.program import AttentionCore
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
_NO_BLOCKS = 1 << 30  # the block size of a mask that nobody gave


def is_flex(node: Node) -> bool:
    """Whether a node is the operator."""
    return node.target is FLEX


def from_flex(gm: GraphModule, flex: Node, outputs: set[Node], calls: CallsOnce) -> AttentionCore:
    """The attention that the operator computes. What it means is inserted before it.

    Args:
        gm: The graph.
        flex: The operator.
        outputs: See `from_softmax`.
        calls: See `from_softmax`.

    Raises:
        UnknownFormError: If its `score_mod` has no normal form.
        LeaveAlone: If its mods can't be followed.
    """
    given: Any = flex.args
    query, key, value, score_mod, _, scale, _, score_reads, _ = given
    if any(user.args[1] != 0 and user.users for user in flex.users):
        raise LeaveAlone("its log-sum-exp or its largest scores are read")
    if not same_sizes((shape_of(query) or ())[:1], (shape_of(key) or ())[:1]):
        raise LeaveAlone("its queries and its keys are of other batches")
    if (scale := constant_of(gm, scale)) is None:
        raise LeaveAlone("its scale is computed in the graph")
    mods = Mods(gm, flex, calls)
    mask = _mask(mods, flex)
    out = next(user for user in flex.users if user.target is operator.getitem and user.args[1] == 0)
    inner = frozenset({flex, out})
    if not _changes_scores(gm, flex):
        return AttentionCore(out, query, key, value, mask, scale, inner=inner)
    with gm.graph.inserting_before(flex):
        scores = inline(gm.graph, partial(_scores, scale=scale), (query, key), flex)
    scores = mods.run(score_mod, score_reads, [scores])
    with gm.graph.inserting_before(flex):
        softmax = inline(gm.graph, _weighted_values, (scores, mask, value), flex)
    while softmax.target is not _aten._softmax.default:
        softmax = softmax.all_input_nodes[0]
    core = from_softmax(gm, softmax, outputs, calls)
    return replace(core, node=out, key=key, value=value, inner=inner)


def _changes_scores(gm: GraphModule, flex: Node) -> bool:
    """Whether its `score_mod` returns more than the score as it came."""
    score_mod: Any = flex.args[3]
    graph = getattr(gm, score_mod.target).graph
    return graph.output_node().args[0] is not next(iter(graph.nodes))


def as_sdpa(gm: GraphModule, core: AttentionCore) -> AttentionCore:
    """An attention of `from_flex` with a mask alone by SDPA, in place; others as they are."""
    flex: Any = core.node.args[0] if core.node.target is operator.getitem else core.node
    if flex.target is not FLEX or _changes_scores(gm, flex):
        return core
    args = (core.query, core.key, core.value, core.mask, 0.0, False, core.scale, True)
    with gm.graph.inserting_before(flex):
        out = call(gm.graph, SDPA, args, flex)
    core.node.replace_all_uses_with(out)
    for user in list(flex.users):
        gm.graph.erase_node(user)
    gm.graph.erase_node(flex)
    return replace(core, node=out, inner=frozenset({out}))


def with_masks_alone(gm: GraphModule) -> GraphModule:
    """A copy whose flex attentions are SDPA; the graph itself where it has none, or one that is more than that."""
    flexes = [node for node in gm.graph.nodes if is_flex(node)]
    if not flexes or any(_changes_scores(gm, node) for node in flexes):
        return gm
    copied, calls = copy_graph(gm), CallsOnce()
    try:
        for node in [node for node in copied.graph.nodes if is_flex(node)]:
            as_sdpa(copied, from_flex(copied, node, set(), calls))
    except LeaveAlone:
        return gm
    return finish(copied)


def _scores(query: Tensor, key: Tensor, *, scale: float) -> Tensor:
    """Scores in float32 at least, as the operator has them: `[batch, num_heads, q_len, kv_len]`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    key = repeated(key, query.shape[1])
    return (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale


def _weighted_values(scores: Tensor, mask: Tensor | None, value: Tensor) -> Tensor:
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ repeated(value, scores.shape[1])


def _mask(mods: Mods, flex: Node) -> Node | None:
    """The mask, `[batch or 1, 1, q_len or 1, kv_len or 1]`; None where nothing is hidden."""
    blocks: Any = flex.args[4]
    mask = mods.run(blocks[-1], flex.args[8])  # type: ignore[arg-type]
    shape = shape_of(mask) or ()
    if mask.target is _aten.new_ones.default:
        if blocks[-2] != _NO_BLOCKS:
            raise LeaveAlone("its block mask has no mask_mod, so that blocks alone say which keys are hidden")
        return None
    if not shape:
        return mods.call(_aten.reshape.default, mask, [1, 1, 1, 1])
    if not same_sizes(shape[1:2], (1,)):
        raise LeaveAlone("its mask_mod hides other keys from head to head")
    return mask


class Mods:
    """Computes the mods of one attention before it, for all places of its scores at once.

    Their graphs are of one place, `b`, `h`, `i`, `j` without dimensions. Here these are indices that broadcast, from
    `[batch, 1, 1, 1]` to `[1, 1, 1, kv_len]`. What reads them has to be pointwise, or to take one number of a tensor.

    Args:
        gm: The graph.
        flex: The attention.
        calls: Calls that others have made already.
    """

    def __init__(self, gm: GraphModule, flex: Node, calls: CallsOnce) -> None:
        self._gm, self._flex, self._calls = gm, flex, calls
        given: Any = flex.args
        query, key, *_ = given
        sizes = [calls.size(flex, side, dim) for side, dim in ((query, 0), (query, 1), (query, 2), (key, 2))]
        device = value_of(query).device
        self._places = []
        for dim, size in enumerate(sizes):
            index = self.call(_aten.arange.default, size, dtype=torch.int64, device=device)
            shape = [-1 if each == dim else 1 for each in range(4)]
            self._places.append(self.call(_aten.reshape.default, index, shape))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The result of a call before the attention."""
        return self._calls.call(self._flex, target, *args, **kwargs)

    def run(self, mod: Any, reads: Sequence[Any], scores: Sequence[Node] = ()) -> Node:
        """The result of a mod.

        Args:
            mod: Its graph.
            reads: What it captures.
            scores: Its first argument, where it has that.

        Raises:
            LeaveAlone: If an operator in it is of one place alone.
        """
        varied = {*scores, *self._places}
        arguments = iter([*scores, *self._places, *reads])
        values: dict[Node, Any] = {}
        graph = getattr(self._gm, mod.target).graph
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "call_function":
                read = (values[each] for each in node.all_input_nodes)
                varies = not reads_shape_only(node) and not varied.isdisjoint(read)
                if draws_random_numbers(node) or (varies and not _is_one_by_one(node)):
                    raise LeaveAlone(f"{described(node)} is neither pointwise nor one number of a tensor")
                args = torch.fx.node.map_arg(node.args, values.__getitem__)
                values[node] = self.call(node.target, *args, **node.kwargs)
                if varies:
                    varied.add(values[node])
            elif node.op != "output":
                raise LeaveAlone(f"`{node.name}` is a constant of its own")
        (result,) = graph.output_node().args
        if result not in values:
            raise LeaveAlone("its mod returns no tensor")
        return values[result]


def _is_one_by_one(node: Node) -> bool:
    """Whether an operator gives the same for each place, however many there are."""
    target: Any = node.target
    if shape_of(node) != ():
        return False
    if target is not _aten.index.Tensor:
        return is_pointwise(node)
    args: Any = node.args
    source, indices = args
    return len(shape_of(source) or ()) == len(indices) and all(shape_of(index) == () for index in indices)
