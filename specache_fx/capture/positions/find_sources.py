"""The token, positions, lengths and masks among a decode graph's inputs: by dependence, not by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.capture.graph.collectives import full_rows
from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    hint_of,
    is_integer,
    is_static_input,
    placeholders,
    shape_of,
    symbols_of,
    target_name,
    value_of,
)
from specache_fx.capture.positions.newest_tokens import NEWEST_OF
from specache_fx.capture.program import AttentionSite, CacheForm
from specache_fx.runtime.handle_form import token_dim
from specache_fx.runtime.sources import Sources

_SAME_TOKENS = {"reshape", "unsqueeze", "squeeze", "_to_copy", "clone", "index_put", "masked_fill", "where"}
_SAME_TOKENS |= {"sub"}  # where a shard of a table begins


def _is_integer_tensor(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def _is_mask(node: Node, shape: tuple[Any, ...], past_len: Any, grows: bool) -> bool:
    """Whether an input looks like a mask over keys: integers or booleans, or floats of the cache's length.

    Floats of two dimensions are 1 where a key is seen, those of four are added to the scores (`Sources.ahead`).

    Args:
        node: The input.
        shape: Its shape.
        past_len: Tokens of a cache.
        grows: `past_len` is a symbol, and not a window's length.
    """
    if len(shape) < 2:
        return False
    if _is_integer_tensor(node) or value_of(node).dtype == torch.bool:
        # Where Dynamo knows that the context grows, it knows so of its masks. Windows alone don't tell it.
        return isinstance(shape[-1], torch.SymInt) or (not grows and shape[-1] > 1)
    whole = statically_known_true(shape[-1] == past_len + 1)
    if len(shape) == 4:
        return bool(value_of(node).is_floating_point() and whole and symbols_of(past_len))
    is_whole = isinstance(shape[-1], torch.SymInt) or whole
    return bool(len(shape) == 2 and value_of(node).is_floating_point() and is_whole)


def _window_masks(sites: Sequence[AttentionSite]) -> dict[Node, int]:
    """Inputs that are masks of windows alone, `[batch, num_heads or 1, 1, kv_len]`, and how wide they get."""
    found = dict[Node, int]()
    for site in sites:
        if site.keys.window is not None and site.core.mask is not None:
            kv_len = (shape_of(site.keys.root) or ())[2]
            for node in ancestors([site.core.mask]):
                shape = shape_of(node) or ()
                if node.op == "placeholder" and len(shape) == 4 and statically_known_true(shape[3] == kv_len):
                    found[node] = site.keys.window
    others = ancestors(
        site.core.mask for site in sites if site.keys.window is None and site.core.mask is not None
    )
    return {node: most for node, most in found.items() if node not in others}


def find_token(graph: Graph) -> tuple[Node | None, int | None]:
    """The integer input that indexes an embedding whose table has a row per logit, and the table's rows.

    Where processes share a table, that is the whole table.
    """
    shapes = [shape_of(out) for out in graph.output_node().all_input_nodes]
    last_dims = {shape[-1] for shape in shapes if shape and isinstance(shape[-1], int)}
    found: list[tuple[bool, Node, int]] = []
    for start in placeholders(graph):
        if not _is_integer_tensor(start) or is_static_input(start):
            continue
        work, seen = [start], set()
        while work:
            node = work.pop()
            if node in seen:
                continue
            seen.add(node)
            for user in node.users:
                if target_name(user) == "embedding" and user.args[1] is node:
                    table = shape_of(user.args[0])
                    assert table is not None
                    rows = full_rows(user, int(table[0]), last_dims)
                    found.append((rows in last_dims, start, rows))
                elif target_name(user) in _SAME_TOKENS:
                    work.append(user)
    if not found:
        return None, None
    _, node, rows = max(found, key=lambda entry: (entry[0], NEWEST_OF in entry[1].meta))
    return node, rows


def find_sources(
    gm: GraphModule, sites: Sequence[AttentionSite], past_inputs: Sequence[int], positions: Collection[int]
) -> Sources:
    """Name the inputs of a decode graph; their masks come with `mask_graphs.with_masks`.

    Args:
        gm: The graph.
        sites: Its attentions.
        past_inputs: Positions of the past KV inputs.
        positions: Those of inputs that are known to grow by one per token.
    """
    inputs = placeholders(gm.graph)
    index = {node: i for i, node in enumerate(inputs)}
    past = {inputs[i] for i in past_inputs}
    token, vocabulary = find_token(gm.graph)
    token_shape = shape_of(token) if token is not None else None
    shapes, masks = set[int](), set[int]()
    growing_by_one = set[int]()
    max_lengths: dict[int, int] = {}
    for site in sites:
        if site.keys.window is not None and site.keys.past is not None and site.values.past is not None:
            max_lengths |= {index[side]: site.keys.window - 1 for side in (site.keys.past, site.values.past)}
    growing = [i for i in past_inputs if i not in max_lengths] or past_inputs
    of_windows = _window_masks(sites)
    past_len = _kv_len(inputs[growing[0]])
    grows = bool(symbols_of(past_len)) and growing[0] not in max_lengths
    whole_ids = {node.meta[NEWEST_OF] for node in inputs if NEWEST_OF in node.meta}
    fixed_sizes_of_inputs: set[Any] = set()
    for node in inputs:
        shape = shape_of(node)
        if index[node] in positions and shape is not None:
            growing_by_one.add(index[node])
            continue
        if shape is None or is_static_input(node) or node in whole_ids:
            continue
        if node in past or (
            len(shape) == 4
            and value_of(node).is_floating_point()
            and statically_known_true(shape[2] == past_len)
        ):
            shapes.add(index[node])
            fixed_dims = (*shape[:2], *shape[3:])
        elif node in of_windows or (node is not token and _is_mask(node, shape, past_len, grows)):
            masks.add(index[node])
            fixed_dims = shape[:-1]
        else:
            fixed_dims = shape
        for size in fixed_dims:
            fixed_sizes_of_inputs |= symbols_of(size)
        if index[node] in shapes | masks:
            continue
        same_shape = token_shape is not None and (shape == token_shape or shape[-2:] == token_shape)
        if node is not token and _is_integer_tensor(node) and len(shape) and (same_shape or shape == (1,)):
            growing_by_one.add(index[node])
    lengths, of_lengths = _lengths(inputs, max_lengths, growing, fixed_sizes_of_inputs)
    max_lengths |= of_lengths | {index[node]: columns for node, columns in of_windows.items()}
    fixed = all(not symbols_of(_kv_len(inputs[i])) for i in growing)
    takes_one = token is not None and statically_known_true((token_shape or (1,))[-1] == 1)
    return Sources(
        token=index[token] if token is not None and takes_one else None,
        vocabulary=vocabulary,
        lengths=frozenset(lengths),
        positions=frozenset(growing_by_one),
        masks=frozenset(masks),
        shapes=frozenset(shapes),
        whole_ids=frozenset(map(index.__getitem__, whole_ids)),
        max_lengths=max_lengths,
        knows_next=bool(growing_by_one) or not fixed or bool(lengths),
        fixed_length=fixed,
    )


def _lengths(
    inputs: Sequence[Node], windows: Mapping[int, int], growing: Sequence[int], fixed: set[Any]
) -> tuple[set[int], dict[int, int]]:
    """Integers among the inputs that are lengths; and those of windows' pasts, with how long they get.

    Args:
        inputs: The graph's placeholders.
        windows: Positions of windows' pasts, and how long they get.
        growing: Positions of the pasts that grow.
        fixed: Symbols of sizes that don't grow.
    """
    whole = set().union(*(symbols_of(_kv_len(inputs[i])) for i in growing if i not in windows))
    lengths, max_lengths = set[int](), dict[int, int]()
    for place, node in enumerate(inputs):
        # An integer that is also a size that does not grow (the batch) is no length. One that nothing
        # reads tells none either: where a handle begins in its storage.
        symbols = symbols_of(value_of(node)) if is_integer(node) and node.users else set()
        if not symbols or symbols & fixed:
            continue
        lengths.add(place)
        # The length of a window's past comes in as an integer too. One that is also a whole cache's isn't full yet.
        for i in windows:
            if symbols == symbols_of(_kv_len(inputs[i])) and not symbols & whole:
                max_lengths[place] = windows[i]
    return lengths, max_lengths


def _kv_len(past: Node) -> Any:
    """Tokens of a past KV input."""
    return (shape_of(past) or ())[2]


def fixed_sizes(
    inputs: Sequence[Node], past_inputs: Sequence[int], forms: Mapping[int, CacheForm], sources: Sources
) -> dict[int, int]:
    """Inputs that grow with the context and are of constant size here, and in which dimension of Dynamo's tensor."""
    values = {form.values for form in forms.values()}  # of a pair: the keys tell
    token_dims = {i: token_dim(forms[i].form) if i in forms else 2 for i in past_inputs if i not in values}
    # One that is cut to the keys' length tells Dynamo nothing about its own: it is as long as the keys are now.
    lengths = {length + 1 for length in kv_lens(inputs, past_inputs, sources)}
    mask_dims = {}
    for i, node in enumerate(inputs):
        shape = shape_of(node) or ()
        as_long = len(shape) > 1 and i != sources.token and _now(shape[-1]) in lengths
        is_whole = as_long and (_is_integer_tensor(node) or value_of(node).dtype == torch.bool)
        if i in sources.masks or (is_whole and not is_static_input(node)):
            mask_dims[i] = len(shape) - 1
    return {
        i: dim
        for i, dim in (token_dims | mask_dims).items()
        # Dynamo makes a constant of 1 whatever marks it has.
        if not symbols_of(size := (shape_of(inputs[i]) or ())[2 if i in token_dims else -1]) and size > 1
    }


def kv_lens(inputs: Sequence[Node], past_inputs: Sequence[int], sources: Sources) -> frozenset[int]:
    """Tokens of the caches that grow, in the call that is traced."""
    now = (_now(_kv_len(inputs[i])) for i in past_inputs if i not in sources.max_lengths)
    return frozenset(length for length in now if length is not None)


def _now(size: Any) -> int | None:
    """The value of a size in this call; None where it can't be told."""
    hint = hint_of(size)
    return hint if isinstance(hint, int) else None
