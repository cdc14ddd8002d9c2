"""One spelling of each operator, and no operator without effect; `capture/trace.py` ends with it.

    x.view(x.shape); x[:, :]; x.expand(x.shape); alias(x)     ->  x
    permute(x, [0, 2, 1])                                     ->  transpose(x, 1, 2)
    permute(x, [0, 2, 3, 1])                                  ->  transpose(transpose(x, 1, 2), 2, 3)
    transpose(transpose(x, 1, 2), 1, 2)                       ->  x
    slice(slice_scatter(x, y, 0, start, end), 0, start, end)  ->  y
    repeat of a dimension of size 1                           ->  expand
    s + expand(mask); sdpa(q, k, v, expand(mask))             ->  s + mask; sdpa(q, k, v, mask)
    sdpa(q, k, v, not expand(mask))                           ->  sdpa(q, k, v, slice(not expand(mask), 1, 0, 1))
    view, _unsafe_view; x == False                            ->  reshape; logical_not(x)

Sizes that Dynamo left open are compared as symbols: no guard is added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from specache_fx.capture.graph_edit import call
from specache_fx.capture.graph_utils import (
    cut_of,
    is_pointwise,
    order_of,
    same_sizes,
    shape_of,
    unexpanded,
    value_of,
)
from specache_fx.capture.normalize_attention import SDPA, SDPA_DEFAULTS

_aten = torch.ops.aten
_SQUEEZES = (_aten.squeeze.dim, _aten.squeeze.dims)
_LAYOUTS = (_aten.reshape.default, _aten.expand.default, _aten.slice.Tensor, *_SQUEEZES)
_SAME_ELEMENTS = (_aten.clone.default, _aten.reshape.default, _aten.unsqueeze.default, *_SQUEEZES)
_VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default,
    _aten.slice.Tensor, _aten.select.int, _aten.expand.default,
)  # fmt: skip
_SAME: tuple[Any, ...] = (_aten.alias.default, _aten.detach.default, _aten.lift_fresh_copy.default)


def simplify(graph: Graph) -> None:
    """Take out slices of everything, views of the same shape and aliases, and spell the rest in one way."""
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.target in (_aten.view.default, _aten._unsafe_view.default):
            node.target = _aten.reshape.default  # of any strides
        elif len(moved := [i for i, dim in enumerate(order_of(node) or ()) if i != dim]) == 2:
            node.target, node.args = _aten.transpose.int, (node.args[0], *moved)
        elif order_of(node) == [0, 2, 3, 1]:  # keys, heads first and transposed for their product
            with graph.inserting_before(node):
                first = call(graph, _aten.transpose.int, (node.args[0], 1, 2), node)
            known.setdefault(first.args, first)
            node.target, node.args = _aten.transpose.int, (known[first.args], 2, 3)
        elif node.target is _aten.eq.Scalar and node.args[1] == 0 and _is_bool(node.args[0]):
            node.target, node.args = _aten.logical_not.default, node.args[:1]  # Inductor fails on the other
        elif node.target is SDPA:  # the dispatcher leaves out arguments equal to their defaults
            node.args = (*node.args, *SDPA_DEFAULTS[len(node.args) - 3 :])
            node.args = (*node.args[:3], _of_one_head(unexpanded(node.args[3])), *node.args[4:])
        elif node.target is _aten.repeat.default and not _is_returned(node):
            _as_expand(node)
        elif node.target in (_aten.full_like.default, _aten.new_full.default):
            _without_example(node)
        elif node.target is _aten.slice_scatter.default:
            _with_an_end(node)
        if is_pointwise(node):
            _broadcast(node)
        if node.target is _aten.transpose.int:
            node.args = (node.args[0], *(dim % len(shape_of(node) or ()) for dim in node.args[1:]))
        part = _written_part(node)
        if part is not None:
            node.replace_all_uses_with(part)
            graph.erase_node(node)
            continue
        if node.target is _aten.reshape.default:
            source: Any = node.args[0]
            while source.target in _SAME_ELEMENTS:
                source = source.args[0]
                # Back to a shape that the same elements had.
                if source.op != "placeholder" and same_sizes(value_of(node).shape, value_of(source).shape):
                    node.args = (source, *node.args[1:])
        equal = _equal_to(node) if node.op == "call_function" else None
        if equal is None and node.target is _aten.transpose.int:  # attention reads the one that is returned
            same = known.setdefault(node.args, node)
            equal = same if same is not node else None
        if equal is not None:
            node.replace_all_uses_with(equal)
            graph.erase_node(node)


def _is_bool(node: Any) -> bool:
    return value_of(node).dtype is torch.bool


def _without_example(node: Node) -> None:
    """Make `full` of `full_like(x, n)` and `new_full(x, size, n)`, where n is computed: of x only dtype is read."""
    value = value_of(node)
    if isinstance(node.args[-1], Node) and all(isinstance(size, int) for size in value.shape):
        node.target, node.args = _aten.full.default, (list(value.shape), node.args[-1])
        node.kwargs = {"dtype": value.dtype, "device": value.device}


def _broadcast(node: Node) -> None:
    """Drop the `expand` of an operand where another one has the result's shape already."""
    if not any(arg.target is _aten.expand.default for arg in node.all_input_nodes):
        return
    others = (arg for arg in node.all_input_nodes if arg.target is not _aten.expand.default)
    if any(same_sizes(shape_of(other) or (), shape_of(node) or ()) for other in others):
        node.args = map_arg(node.args, unexpanded)


def _as_expand(node: Node) -> None:
    """Make `expand` of a `repeat` of dimensions of size 1."""
    args: Any = node.args
    source, times = args
    before = shape_of(source) or ()
    more = len(times) - len(before)  # dimensions in front, which have no size yet
    if all(each == 1 or same_sizes([size], [1]) for size, each in zip(before, times[more:], strict=True)):
        sizes = [*times[:more], *(-1 if each == 1 else each for each in times[more:])]
        node.target, node.args = _aten.expand.default, (source, sizes)


def _of_one_head(mask: Any) -> Any:
    """One head of a mask that is the same for all heads: SDPA broadcasts it."""
    if not isinstance(mask, Node) or same_sizes((shape_of(mask) or ())[-3:-2] or (1,), (1,)):
        return mask
    if not _is_same_for_heads(mask, {}):
        return mask
    with mask.graph.inserting_after(mask):
        return call(mask.graph, _aten.slice.Tensor, (mask, len(shape_of(mask) or ()) - 3, 0, 1), mask)


def _is_same_for_heads(mask: Any, known: dict[Node, bool]) -> bool:
    """Whether the third to last dimension of a tensor was expanded, and every head treated the same since."""
    if not isinstance(mask, Node) or same_sizes((shape_of(mask) or ())[-3:-2] or (1,), (1,)):
        return True
    if mask in known:
        return known[mask]
    sliced = mask.args[1] if mask.target is _aten.slice.Tensor and len(mask.args) > 1 else 0
    if mask.target is _aten.slice.Tensor and sliced in (-3, len(shape_of(mask) or ()) - 3):
        return False
    follows = is_pointwise(mask) or mask.target in (
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.clone.default,
        _aten._to_copy.default,
    )
    known[mask] = follows and all(_is_same_for_heads(each, known) for each in mask.all_input_nodes)
    return known[mask]


def _with_an_end(node: Node) -> None:
    """A slice that is written to the end ends there: vmap's rule takes the end for a number of elements."""
    dim, start, end, step = cut_of(node) or (0, 0, 0, 1)
    size = value_of(node).shape[dim]
    if isinstance(size, int) and isinstance(end, int) and end > size:
        node.args = (*node.args[:2], dim, start, size, step)


def _written_part(node: Node) -> Node | None:
    """The rows of a batch that a slice reads back right after they were written, or a write of all rows.

    Not tokens: a prompt's are read out of the buffer that they were written into (`capture/buffer_reads.py`).
    """
    scatter: Any = node.args[0] if node.target is _aten.slice.Tensor else node
    if scatter.target is not _aten.slice_scatter.default:
        return None
    part = scatter.args[1]
    value, written = value_of(node), value_of(part)
    (dim, start, _, step), (same, begin, _, each) = (cut_of(one) or (None,) * 4 for one in (scatter, node))
    alike = (dim, step) == (same, each) == (0, 1) and same_sizes([value_of(start)], [value_of(begin)])
    return part if alike and same_sizes(value.shape, written.shape) and value.dtype == written.dtype else None


def _equal_to(node: Node) -> Node | None:
    """The earlier node with the same numbers in the same shape, where a node does nothing or undoes the one before."""
    source: Any = node.args[0] if node.args else None
    if node.target in _SAME:
        return source
    if (order := order_of(node)) is not None:
        before = order_of(source)
        back = before is not None and [before[dim] for dim in order] == sorted(order)
        return source.args[0] if back and not (_is_returned(source) or _is_returned(node)) else None
    if node.target not in _LAYOUTS:
        return None
    value, other = value_of(node), value_of(source)
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    if (cut := cut_of(node)) is not None and cut[1] != 0:
        return None  # the newest n tokens, of which there are no more: a window says so
    return source if same_sizes(value.shape, other.shape) else None


def _is_returned(node: Node) -> bool:
    """Whether a node or a view of it is an output: a cache, perhaps, that attention reads by a swap."""
    shapes = (*_SAME_ELEMENTS, *_VIEWS)
    return any(user.op == "output" or (user.target in shapes and _is_returned(user)) for user in node.users)
