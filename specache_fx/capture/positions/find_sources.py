"""The positions, lengths and masks among a decode graph's inputs: by dependence, not by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specache_fx.capture.graph.graph_slices import ancestors
from specache_fx.capture.graph.graph_utils import (
    hint_of,
    is_integer,
    is_integer_tensor,
    is_static_input,
    placeholders,
    shape_of,
    symbols_of,
    value_of,
)
from specache_fx.capture.positions.newest_tokens import NEWEST_OF
from specache_fx.capture.program import AttentionSite, CacheForm
from specache_fx.runtime.graph.sources import Sources
from specache_fx.runtime.handles.handle_form import token_dim


def find_sources(
    gm: GraphModule,
    sites: Sequence[AttentionSite],
    past_inputs: Sequence[int],
    positions: Collection[int],
    token: Node | None,
) -> Sources:
    """Name the inputs of a decode graph.

    Args:
        gm: The graph.
        sites: Its attentions.
        past_inputs: Positions of the past KV inputs.
        positions: Those of inputs that are known to grow by one per token.
        token: From `find_token`.
    """
    inputs = placeholders(gm.graph)
    windows = {
        inputs.index(past): site.keys.window - 1
        for site in sites
        for past in (site.keys.past, site.values.past)
        if site.keys.window is not None and past is not None
    }
    masks_of_windows = _masks_of_windows(sites)
    growing = [i for i in past_inputs if i not in windows] or past_inputs
    past_len = _kv_len(inputs[growing[0]])
    grows = bool(symbols_of(past_len)) and growing[0] not in windows
    counts = {i for i in positions if shape_of(inputs[i]) is not None}
    masks, caches, fixed = set[int](), set[int](), set[Any]()  # the last are symbols of sizes that don't grow
    whole_ids = {node.meta.get(NEWEST_OF) for node in inputs}
    for i, node in enumerate(inputs):
        shape = shape_of(node)
        if shape is None or i in counts or is_static_input(node) or node in whole_ids:
            continue
        if i in past_inputs or _is_as_long(node, shape, past_len):
            caches.add(i)
            shape = (*shape[:2], *shape[3:])
        elif node in masks_of_windows or (node is not token and _is_mask(node, shape, past_len, grows)):
            masks.add(i)
            shape = shape[:-1]
        elif node is not token and is_integer_tensor(node) and _is_of_tokens(shape, token):
            counts.add(i)
        fixed = fixed.union(*map(symbols_of, shape))
    lengths, of_lengths = _lengths(inputs, windows, growing, fixed)
    return Sources(
        counts=frozenset(counts | lengths),
        masks=frozenset(masks),
        caches=frozenset(caches),
        max_lengths=windows
        | of_lengths
        | {inputs.index(node): most for node, most in masks_of_windows.items()},
        fixed_length=all(not symbols_of(_kv_len(inputs[i])) for i in growing),
    )


def _masks_of_windows(sites: Sequence[AttentionSite]) -> dict[Node, int]:
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


def _is_as_long(node: Node, shape: tuple[Any, ...], past_len: Any) -> bool:
    """Whether an input is a tensor like a cache, of as many tokens."""
    is_like = len(shape) == 4 and value_of(node).is_floating_point()
    return is_like and statically_known_true(shape[2] == past_len)


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
    is_open = isinstance(shape[-1], torch.SymInt)
    if is_integer_tensor(node) or value_of(node).dtype == torch.bool:
        # Where Dynamo knows that the context grows, it knows so of its masks. Windows alone don't tell it.
        return is_open or (not grows and shape[-1] > 1)
    is_whole = statically_known_true(shape[-1] == past_len + 1)
    looks_so = (
        is_open or is_whole if len(shape) == 2 else is_whole and len(shape) == 4 and symbols_of(past_len)
    )
    return bool(value_of(node).is_floating_point() and looks_so)


def _is_of_tokens(shape: tuple[Any, ...], token: Node | None) -> bool:
    """Whether integers of a shape may be the tokens' positions."""
    return bool(shape) and (shape == (1,) or (token is not None and shape_of(token) in (shape, shape[-2:])))


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
    inputs: Sequence[Node],
    past_inputs: Sequence[int],
    forms: Mapping[int, CacheForm],
    sources: Sources,
    token: Node | None,
) -> dict[int, int]:
    """Inputs that grow with the context and are of constant size here, and in which dimension of Dynamo's tensor."""
    values = {form.values for form in forms.values()}  # of a pair: the keys tell
    token_dims = {i: token_dim(forms[i].form) if i in forms else 2 for i in past_inputs if i not in values}
    # One that is cut to the keys' length tells Dynamo nothing about its own: it is as long as the keys are now.
    lengths = {length + 1 for length in kv_lens(inputs, past_inputs, sources)}
    mask_dims = {}
    for i, node in enumerate(inputs):
        shape = shape_of(node) or ()
        as_long = len(shape) > 1 and node is not token and _now(shape[-1]) in lengths
        is_whole = as_long and (is_integer_tensor(node) or value_of(node).dtype == torch.bool)
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
