"""One spelling of each operator, and no operator without effect: `RULES`. `capture/graph/trace.py` ends with it.

A rule is a row: the operators that it looks at, and a function of a node that calls one of them. The function changes
the node's call, or returns the node that computes the same. `tests/unit/capture/graph/test_simplify.py` shows a graph
before and after each. Sizes that Dynamo left open are compared as symbols: no guard is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from specache_fx.capture.graph.graph_edit import call
from specache_fx.capture.graph.graph_slices import has_effect
from specache_fx.capture.graph.graph_utils import (
    cut_of,
    is_pointwise,
    order_of,
    same_sizes,
    shape_of,
    unexpanded,
    value_of,
)
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
_ORDERS = (_aten.permute.default, _aten.transpose.int)
_SDPA_DEFAULTS = (None, 0.0, False, None, False)  # of the arguments behind query, key and value
_SQUEEZES = (_aten.squeeze.dim, _aten.squeeze.dims)
_LAYOUTS = (_aten.reshape.default, _aten.expand.default, _aten.slice.Tensor, *_SQUEEZES)
_SAME_ELEMENTS = (_aten.clone.default, _aten.reshape.default, _aten.unsqueeze.default, *_SQUEEZES)
_VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, *_ORDERS, _aten.slice.Tensor, _aten.select.int,
    _aten.expand.default,
)  # fmt: skip


def _as_reshape(node: Node) -> None:
    """Make `reshape`, of any strides, of a view."""
    node.target = _aten.reshape.default


def _as_transposes(node: Node) -> Node | None:
    """Make a `transpose` of a permutation that swaps two dimensions, and two of that for a product's heads-first keys.

    permute(x, [0, 2, 1])                       ->  transpose(x, 1, 2)
    permute(x, [0, 2, 3, 1])                    ->  transpose(transpose(x, 1, 2), 2, 3)
    """
    order = order_of(node) or []
    moved = [i for i, dim in enumerate(order) if i != dim]
    if not moved:
        return node.args[0]  # type: ignore[return-value]
    if len(moved) == 2:
        node.target, node.args = _aten.transpose.int, (node.args[0], *moved)
    elif order == [0, 2, 3, 1]:
        with node.graph.inserting_before(node):
            first = call(node.graph, _aten.transpose.int, (node.args[0], 1, 2), node)
        node.target, node.args = _aten.transpose.int, (_called_before(first) or first, 2, 3)
    return None


def _as_logical_not(node: Node) -> None:
    """Make `logical_not(x)` of `x == False`, on which Inductor fails."""
    if node.args[1] == 0 and value_of(node.args[0]).dtype is torch.bool:
        node.target, node.args = _aten.logical_not.default, node.args[:1]


def _with_defaults(node: Node) -> None:
    """Give SDPA all of its arguments: the dispatcher leaves out those equal to their defaults."""
    node.args = (*node.args, *_SDPA_DEFAULTS[len(node.args) - 3 :])


def _with_one_head_of_mask(node: Node) -> None:
    """Give SDPA one head of a mask that is the same for all heads: it broadcasts that.

    sdpa(q, k, v, expand(mask))      ->  sdpa(q, k, v, mask)
    sdpa(q, k, v, not expand(mask))  ->  sdpa(q, k, v, slice(not expand(mask), 1, 0, 1))
    """
    mask: Any = unexpanded(node.args[3])
    if not _has_one_head(mask) and _is_same_for_heads(mask, {}):
        with node.graph.inserting_before(mask.next):
            mask = call(node.graph, _aten.slice.Tensor, (mask, len(shape_of(mask) or ()) - 3, 0, 1), mask)
    node.args = (*node.args[:3], mask, *node.args[4:])


def _has_one_head(mask: Any) -> bool:
    return not isinstance(mask, Node) or same_sizes((shape_of(mask) or ())[-3:-2] or (1,), (1,))


def _is_same_for_heads(mask: Any, known: dict[Node, bool]) -> bool:
    """Whether the third to last dimension of a tensor was expanded, and every head treated the same since."""
    if _has_one_head(mask):
        return True
    if mask not in known:
        cut = cut_of(mask) if mask.target is _aten.slice.Tensor else None
        follows = is_pointwise(mask) or mask.target in (
            *(_aten.expand.default, _aten.slice.Tensor, _aten.clone.default, _aten._to_copy.default),
        )
        follows = follows and (cut is None or cut[0] != len(shape_of(mask) or ()) - 3)
        known[mask] = follows and all(_is_same_for_heads(each, known) for each in mask.all_input_nodes)
    return known[mask]


def _as_expand(node: Node) -> None:
    """Make `expand` of a `repeat` of dimensions of size 1, unless it is a cache."""
    args: Any = node.args
    source, times = args
    before = shape_of(source) or ()
    more = len(times) - len(before)  # dimensions in front, which have no size yet
    ones = (each == 1 or same_sizes([size], [1]) for size, each in zip(before, times[more:], strict=True))
    if all(ones) and not _is_returned(node):
        sizes = [*times[:more], *(-1 if each == 1 else each for each in times[more:])]
        node.target, node.args = _aten.expand.default, (source, sizes)


def _as_full(node: Node) -> None:
    """Make `full` of `full_like(x, n)` and `new_full(x, size, n)`, where n is computed: of x only dtype is read."""
    value = value_of(node)
    if isinstance(node.args[-1], Node) and all(isinstance(size, int) for size in value.shape):
        node.target, node.args = _aten.full.default, (list(value.shape), node.args[-1])
        node.kwargs = {"dtype": value.dtype, "device": value.device}


def _as_where(node: Node) -> None:
    """Make `where(mask, number, x)` of `index_put(x, [mask], number)`, which vmap has no rule for."""
    args: Any = node.args
    written, (mask, *more), number, *accumulate = args
    is_mask = isinstance(mask, Node) and value_of(mask).dtype is torch.bool
    if not is_mask or more or accumulate or shape_of(number) != ():
        return
    with node.graph.inserting_before(node):
        for _ in range(len(shape_of(written) or ()) - len(shape_of(mask) or ())):  # it hides whole rows
            mask = call(node.graph, _aten.unsqueeze.default, (mask, -1), node)
    node.target, node.args = _aten.where.self, (mask, number, written)


def _with_an_end(node: Node) -> None:
    """End a slice that is written to the end there: vmap's rule takes the end for a number of elements."""
    dim, start, end, step = cut_of(node) or (0, 0, 0, 1)
    size = value_of(node).shape[dim]
    if isinstance(size, int) and isinstance(end, int) and end > size:
        node.args = (*node.args[:2], dim, start, size, step)


def _broadcast(node: Node) -> None:
    """Drop the `expand` of an operand where another one has the result's shape already."""
    others = [arg for arg in node.all_input_nodes if arg.target is not _aten.expand.default]
    if not is_pointwise(node) or len(others) == len(node.all_input_nodes):
        return
    if any(same_sizes(shape_of(other) or (), shape_of(node) or ()) for other in others):
        node.args = map_arg(node.args, unexpanded)


def _written_part(node: Node) -> Node | None:
    """The rows of a batch that a slice reads back right after they were written, or a write of all rows.

    Not tokens: a prompt's are read out of the buffer that they were written into (`capture/caches/buffer_reads.py`).
    """
    scatter: Any = node.args[0] if node.target is _aten.slice.Tensor else node
    if scatter.target is not _aten.slice_scatter.default:
        return None
    part = scatter.args[1]
    value, written = value_of(node), value_of(part)
    (dim, start, _, step), (same, begin, _, each) = (cut_of(one) or (None,) * 4 for one in (scatter, node))
    is_same = (dim, step) == (same, each) == (0, 1) and same_sizes([value_of(start)], [value_of(begin)])
    return (
        part if is_same and same_sizes(value.shape, written.shape) and value.dtype == written.dtype else None
    )


def _of_earlier_shape(node: Node) -> None:
    """Have a reshape that gives an earlier shape of the same elements back read the tensor of that shape."""
    source: Any = node.args[0]
    while source.target in _SAME_ELEMENTS:
        source = source.args[0]
        if source.op != "placeholder" and same_sizes(value_of(node).shape, value_of(source).shape):
            node.args = (source, *node.args[1:])


def _its_input(node: Node) -> Any:
    return node.args[0]


def _undone(node: Node) -> Any:
    """What was swapped before it is swapped back, unless either is a cache."""
    source: Any = node.args[0]
    order, before = order_of(node) or [], order_of(source)
    back = before is not None and [before[dim] for dim in order] == sorted(order)
    return source.args[0] if back and not (_is_returned(source) or _is_returned(node)) else None


def _of_same_shape(node: Node) -> Any:
    """What has all elements in the same shape already."""
    value, other = value_of(node), value_of(node.args[0])
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    if (cut := cut_of(node)) is not None and cut[1] != 0:
        return None  # the newest n tokens, of which there are no more: a window says so
    return node.args[0] if same_sizes(value.shape, other.shape) else None


def _called_before(node: Node) -> Node | None:
    """An earlier equal call: of a tensor that is swapped twice, attention reads the one that is returned."""
    (source,) = node.all_input_nodes
    twins = (user for user in source.users if user.target is node.target and user.args == node.args)
    return next((twin for twin in twins if twin < node), None)


def _is_returned(node: Node) -> bool:
    """Whether a node or a view of it is an output: a cache, perhaps, that attention reads by a swap."""
    shapes = (*_SAME_ELEMENTS, *_VIEWS)
    return any(user.op == "output" or (user.target in shapes and _is_returned(user)) for user in node.users)


Rule = tuple[tuple[Any, ...], Callable[[Node], Node | None]]
RULES: tuple[Rule, ...] = (
    ((_aten.view.default, _aten._unsafe_view.default), _as_reshape),
    (_ORDERS, _as_transposes),
    ((_aten.eq.Scalar,), _as_logical_not),
    ((SDPA,), _with_defaults),
    ((SDPA,), _with_one_head_of_mask),
    ((_aten.repeat.default,), _as_expand),
    ((_aten.full_like.default, _aten.new_full.default), _as_full),
    ((_aten.index_put.default,), _as_where),
    ((_aten.slice_scatter.default,), _with_an_end),
    ((), _broadcast),
    ((_aten.slice.Tensor, _aten.slice_scatter.default), _written_part),
    ((_aten.reshape.default,), _of_earlier_shape),
    ((_aten.alias.default, _aten.detach.default, _aten.lift_fresh_copy.default), _its_input),
    (_ORDERS, _undone),
    (_LAYOUTS, _of_same_shape),
    ((_aten.transpose.int,), _called_before),
)
"""Operators (none: any), and the function. A later row sees what earlier ones have made of a node."""


def simplify(graph: Graph, rules: Iterable[Rule] = RULES) -> None:
    """Apply the rules to each node of a functional graph, in the order of both."""
    for node in list(graph.nodes):
        for operators, rewrite in rules:
            if operators and node.target not in operators:
                continue
            if (equal := rewrite(node)) is not None:
                node.replace_all_uses_with(equal)
                graph.erase_node(node)
                break


# Numbers and sizes that are read of a tensor's elements: each has a symbol of its own.
_UNKNOWN_SIZES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def merge_equal_calls(graph: Graph) -> None:
    """Have the first of equal calls stand for all, unless an output is the result of one, or a view of it."""
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        tags = {*getattr(node.target, "tags", ())}
        if node.op != "call_function" or has_effect(node) or tags & _UNKNOWN_SIZES or _is_returned(node):
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        if (first := known.setdefault(key, node)) is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(arg: Any) -> Any:
    """An argument of a call as something that can be compared: 1 is neither True nor 1.0, and 0.0 not -0.0."""
    if isinstance(arg, Node):
        return arg
    if isinstance(arg, (list, tuple)):
        return tuple(map(_key, arg))
    if isinstance(arg, dict):
        return tuple((name, _key(each)) for name, each in arg.items())
    if isinstance(arg, slice):
        return slice, _key((arg.start, arg.stop, arg.step))
    return type(arg), repr(arg)
