"""`flex_attention`: the higher-order operator as plain attention, for as long as the analyses look at it.

    out = flex_attention(q, k, v, score_mod, (..., mask_mod), scale)[0]
        -> out = sdpa(q, k, v, mask, 0.0, False, scale, True)               # score_mod changes nothing
        -> s = score_mod(q @ k^T * scale, b, h, i, j)                       # in float32
           out = softmax(where(mask, s, -inf)) @ v

`mask` is `mask_mod(b, h, i, j)`. A list of blocks says no more than the `mask_mod` that it was
made from. Without a `mask_mod` it says more, and the attention stays.

`Flex.settle` puts the operator back where no analysis could use its meaning. It does so in a prompt whose scores are
changed too: the operator keeps no scores in memory. What can't be told plainly is in `Flex.unknown`, with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as FLEX
from torch.fx import GraphModule, Node

from specache_fx.capture.cache_side import LeaveAlone
from specache_fx.capture.graph_edit import copy_graph, finish
from specache_fx.capture.graph_slices import draws_random_numbers
from specache_fx.capture.graph_utils import (
    described,
    is_pointwise,
    reads_shape_only,
    same_sizes,
    shape_of,
    value_of,
)
from specache_fx.capture.mask_rows import MaskRowBuilder
from specache_fx.capture.normalize_attention import SDPA
from specache_fx.capture.program import AttentionSite
from specache_fx.capture.random_numbers import repeated
from specache_fx.capture.trace import inline

_aten = torch.ops.aten
_NO_BLOCKS = 1 << 30  # the block size of a mask that nobody gave


@dataclass
class Flex:
    """The flex attentions of a graph.

    Attributes:
        own: Name, arguments and notes of the operator, by the node that has its meaning.
        unknown: Those that stay, with the reason.
    """

    own: dict[Node, tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    unknown: dict[Node, str] = field(default_factory=dict)

    def settle(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        """Put operators back: those of no site, and those of several tokens whose scores are changed."""
        replaced = {site.core.node for site in sites if site.core.node.target is SDPA or _is_decoded(site)}
        back = {node: self._put_back(node) for node in self.own if node not in replaced}
        return [
            replace(site, core=replace(site.core, node=out, inner=frozenset({out, *out.all_input_nodes})))
            if (out := back.get(site.core.node)) is not None
            else site
            for site in sites
        ]

    def _put_back(self, node: Node) -> Node:
        name, args, meta = self.own[node]
        with node.graph.inserting_before(node):
            whole = node.graph.create_node("call_function", FLEX, args, name=name)
            out = node.graph.call_function(operator.getitem, (whole, 0))
        whole.meta, out.meta = dict(meta), dict(node.meta)
        node.replace_all_uses_with(out)
        return out


def _is_decoded(site: AttentionSite) -> bool:
    return site.keys.past is not None and same_sizes((shape_of(site.core.query) or ())[2:3], (1,))


def flex_attention(gm: GraphModule) -> Flex:
    """Replace each flex attention by what it means, in place."""
    found, rows = Flex(), MaskRowBuilder()
    for node in [node for node in gm.graph.nodes if node.target is FLEX]:
        try:
            meaning = _meaning(gm, node, rows)
        except LeaveAlone as error:
            found.unknown[node] = f"flex_attention can't be told as a mask or a bias there: {error}"
            continue
        meaning._rename(f"{node.name}_plain")
        found.own[meaning] = node.name, node.args, node.meta
        for user in list(node.users):
            user.replace_all_uses_with(meaning)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
    if found.own:
        finish(gm)
    return found


def with_masks_alone(gm: GraphModule) -> GraphModule:
    """A copy whose flex attentions are SDPA; the graph itself where it has none, or one that is more than that."""
    if not any(node.target is FLEX for node in gm.graph.nodes):
        return gm
    copied = copy_graph(gm)
    found = flex_attention(copied)
    return gm if found.unknown or any(node.target is not SDPA for node in found.own) else copied


def _meaning(gm: GraphModule, flex: Node, rows: MaskRowBuilder) -> Node:
    """The output of an attention, computed before it."""
    given: Any = flex.args
    query, key, value, score_mod, _, scale, _, score_reads, _ = given
    if any(user.args[1] != 0 and user.users for user in flex.users):
        raise LeaveAlone("its log-sum-exp or its largest scores are read")
    if not same_sizes((shape_of(query) or ())[:1], (shape_of(key) or ())[:1]):
        raise LeaveAlone("its queries and its keys are of other batches")
    mods = Mods(gm, flex, rows)
    mask = _mask(mods, flex)
    score_graph = getattr(gm, score_mod.target).graph
    if score_graph.output_node().args[0] is next(iter(score_graph.nodes)):  # the score as it came
        return mods.call(SDPA, query, key, value, mask, 0.0, False, scale, True)
    with gm.graph.inserting_before(flex):
        scores = inline(gm.graph, partial(_scores, scale=scale), (query, key), flex)
    scores = mods.run(score_mod, score_reads, [scores])
    with gm.graph.inserting_before(flex):
        return inline(gm.graph, _weighted_values, (scores, mask, value), flex)


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
        rows: Calls that others have made already.
    """

    def __init__(self, gm: GraphModule, flex: Node, rows: MaskRowBuilder) -> None:
        self._gm, self._flex, self._rows = gm, flex, rows
        given: Any = flex.args
        query, key, *_ = given
        sizes = [rows.size(flex, side, dim) for side, dim in ((query, 0), (query, 1), (query, 2), (key, 2))]
        device = value_of(query).device
        self._places = []
        for dim, size in enumerate(sizes):
            index = self.call(_aten.arange.default, size, dtype=torch.int64, device=device)
            shape = [-1 if each == dim else 1 for each in range(4)]
            self._places.append(self.call(_aten.reshape.default, index, shape))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The result of a call before the attention."""
        return self._rows.call(self._flex, target, *args, **kwargs)

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
