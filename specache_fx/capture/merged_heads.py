"""`merged_heads`: caches `[batch, kv_len, num_kv_heads * head_dim]` get a dimension for their heads.

    keys = cat([past, k], 1)                                    # output; past, k [b, tokens, h * d]
    split = reshape(keys, [b, -1, h, d])
        -> split = cat([past, unflatten(k, 2, [h, d])], 1)      # output; past [b, tokens, h, d]

Whisper caches keys so, and others that append a projection as it comes. Inputs and outputs have four dimensions from
then on; `AtBorder` in `specache_fx/border.py` takes heads apart and merges them. Only caches are changed that nothing
reads otherwise, and whose heads are repeated or swapped with tokens next: `heads_first` goes on
from here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from specache_fx.capture.graph_edit import call, finish
from specache_fx.capture.graph_slices import eliminate_dead_code
from specache_fx.capture.graph_utils import (
    concatenated,
    is_float,
    is_static_input,
    output_node,
    placeholders,
    reads_shape_only,
    same_sizes,
    shape_of,
    swaps,
    value_of,
)
from specache_fx.runtime.handle_form import Form, is_laid_out, to_heads_first

_aten = torch.ops.aten


def merged_heads(gm: GraphModule) -> tuple[dict[int, int], dict[int, int]]:
    """Take heads apart, in place.

    Returns:
        Positions of the inputs and of the outputs that have a dimension more from here on, and their heads.
    """
    graph, inputs = gm.graph, placeholders(gm.graph)
    output = output_node(graph)
    outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    merged_inputs: dict[int, int] = {}
    merged_outputs: dict[int, int] = {}
    for root in dict.fromkeys(out for out in outs if isinstance(out, Node)):
        reads, parts, whole = _split_reads(root), concatenated(root), _merged_from(root)
        if whole is None and (not reads or (parts is not None and not _is_append(root, *parts))):
            continue
        heads, dim = (shape_of(whole or reads[0]) or ())[2:]
        with graph.inserting_after(root):
            if whole is not None:
                keys = whole
            elif parts is None:
                keys = call(graph, _aten.unflatten.int, (root, 2, (heads, dim)), root)
            else:
                past, new = parts[0]
                past.meta = {**past.meta, "val": _apart(value_of(past), heads)}
                merged_inputs[inputs.index(past)] = heads
                new = call(graph, _aten.unflatten.int, (new, 2, (heads, dim)), root)
                with graph.inserting_after(new):
                    keys = call(graph, _aten.cat.default, ([past, new], 1), root)
        for read in reads:
            read.replace_all_uses_with(keys)
        for user in list(root.users):
            if user is not keys and user is not output:  # a size
                user.replace_input_with(root, keys)
        for i, out in enumerate(outs):
            if out is root:
                outs[i], merged_outputs[i] = keys, heads
    if merged_outputs:
        output.args = (tuple(outs),)
        eliminate_dead_code(graph)
        finish(gm)
    return merged_inputs, merged_outputs


def _split_reads(root: Node) -> list[Node]:
    """The reshapes that take a cache's heads apart; none where something else reads it."""
    sizes = shape_of(root) or ()
    if root.op == "placeholder" or len(sizes) != 3 or not is_float(root):
        return []
    reads = [user for user in root.users if user.op != "output" and not reads_shape_only(user)]
    shapes = [shape_of(read) or () for read in reads]
    alike = all(
        read.target is _aten.reshape.default
        and len(shape) == 4
        and isinstance(shape[2], int)
        and same_sizes(shape, (*sizes[:2], *shapes[0][2:]))
        and any(swaps(user, 1, 2) or user.target is _aten.unsqueeze.default for user in read.users)
        for read, shape in zip(reads, shapes, strict=True)
    )
    return reads if alike else []


def _merged_from(root: Node) -> Node | None:
    """`[batch, tokens, heads, dim]` of a prompt's keys that are merged to be returned, and read before that."""
    source: Any = root.args[0] if root.target is _aten.reshape.default else None
    if isinstance(source, Node) and source.target is _aten.clone.default:
        source = source.args[0]
    sizes, whole = shape_of(root) or (), shape_of(source) or ()
    alone = all(user.op == "output" or reads_shape_only(user) for user in root.users)
    is_merged = len(sizes) == 3 and len(whole) == 4 and same_sizes(sizes[:2], whole[:2])
    return source if alone and is_merged and isinstance(whole[2], int) else None


def _is_append(root: Node, parts: list[Node], dim: int) -> bool:
    """Whether a `cat` appends this call's tokens to an input that nothing else reads."""
    past = parts[0]
    is_past = past.op == "placeholder" and not is_static_input(past) and len(parts) == 2 and dim == 1
    return is_past and all(user is root or reads_shape_only(user) for user in past.users)


def _apart(value: torch.Tensor, heads: int) -> torch.Tensor:
    """The fake value of a past with its heads apart; that of a handle has a handle's strides."""
    if is_laid_out(value):
        return to_heads_first(value, Form.HEADS_MERGED, heads).transpose(1, 2)
    return value.unflatten(2, (heads, -1))
