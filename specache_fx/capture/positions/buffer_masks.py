"""Masks over whole buffers of fixed length: cut to the tokens that are there, and tested for what they show behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import is_pointwise, same_sizes, shape_of, value_of
from specache_fx.runtime.ops import SDPA

_aten = torch.ops.aten
DATA = (SDPA, _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.embedding.default)
"""A mask that is computed with one of these is none of positions and padding alone."""

_HIDES = -1e4  # or less, as many a model adds: rows of zeros that were never written have no larger scores
_LAYOUTS = (_aten.unsqueeze.default, _aten.expand.default)


def is_narrow(mask: Node) -> bool:
    """Whether a mask has one column for all keys, and so hides none from the others."""
    return (shape_of(mask) or (1,))[-1] == 1


def shows_behind(mask: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    """Whether a mask shows a column from `kv_len` on."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    shows = mask if mask.dtype == torch.bool else mask > _HIDES
    return (shows & (columns >= kv_len)).any()


def cut_to(mask: Node, length: Any, mode: FakeTensorMode, attends: Callable[[Node], bool]) -> Node | None:
    """Have an input that is a mask over the whole buffer come in cut: values are noted anew, no node changes.

    Args:
        mask: What attention takes.
        length: The number of columns.
        mode: Of the graph's fake values.
        attends: Whether a node is part of an attention over buffers: that may read the input too.

    Returns:
        The input; None where the mask is made of none, of more than its columns one by one, or where something else
        reads it.
    """
    width = shape_of(mask)[-1]  # type: ignore[index]
    inside = ancestors([mask])
    given = [node for node in inside if node.op == "placeholder" and _is_wide(node, width)]
    if len(given) != 1:
        return None
    (source,) = given
    whole = value_of(source)
    sizes = (*whole.shape[:-1], length)
    with mode:
        cut = torch.empty_strided(sizes, whole.stride(), dtype=whole.dtype, device=whole.device)
    values = {source: cut}
    try:
        for node in mask.graph.nodes:
            if node in inside and not values.keys().isdisjoint(node.all_input_nodes):
                if node.target not in _LAYOUTS and not is_pointwise(node):
                    return None
                with mode, torch.no_grad():
                    args = torch.fx.node.map_arg(node.args, lambda old: values.get(old, value_of(old)))
                    values[node] = node.target(*args, **node.kwargs)
    except Exception:  # of any operator: the buffer's length is a number in it
        return None
    users = {user for node in values for user in node.users} - inside
    read_elsewhere = not all(map(attends, users))
    if read_elsewhere or not same_sizes(values[mask].shape[-1:], [length]):
        return None
    for node, value in values.items():
        node.meta = {**node.meta, "val": value}
    return source


def _is_wide(node: Node, width: Any) -> bool:
    """Whether an input is a mask over a whole buffer."""
    shape = shape_of(node) or ()
    return len(shape) > 1 and same_sizes(shape[-1:], [width])
