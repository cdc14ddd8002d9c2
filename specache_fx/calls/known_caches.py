"""Caches of transformers that calls without a trace fill: what they hold, and their layers while a model updates them.

    DynamicCache, which grows
      DynamicLayer, DynamicSlidingWindowLayer   pairs: all, or a window's
      LinearAttentionAnd...Layer                pairs, and the states of linear attention
      LinearAttentionLayer, DummyLayer          no pairs
    StaticCache
      StaticLayer                               pairs, in buffers of a fixed length: see `static_cache.py`

Classes are known by their names: to import transformers' `cache_utils` would take a second.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from specache_fx.runtime.layers.layout import LayerShape

_WITH_PAIRS = (
    *("DynamicLayer", "DynamicSlidingWindowLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
)
_WITHOUT = ("DummyLayer", "LinearAttentionLayer")


def grows(cache: Any) -> bool:
    """Whether it is a cache whose layers all grow by concatenation, at one length."""
    if not _is_named(cache, "DynamicCache") or getattr(cache, "offloading", False):
        return False
    kinds = {type(each): each for each in cache.layers}.values()
    if not all(_is_named(each, *_WITH_PAIRS, *_WITHOUT) for each in kinds):
        return False
    if any(getattr(each, "record_past", False) for each in cache.layers):
        return False
    return not kinds or any(map(has_pairs, kinds))


def is_static(cache: Any) -> bool:
    """Whether it is a cache of buffers without windows."""
    if not _is_named(cache, "StaticCache") or getattr(cache, "offloading", False):
        return False
    return bool(cache.layers) and all(_is_named(each, "StaticLayer") for each in cache.layers)


def has_own_methods(cache: Any) -> bool:
    """Whether a cache, or a layer, has a method of its own, which sees each update."""
    values = {type(value): value for each in (cache, *cache.layers) for value in vars(each).values()}
    return any(callable(value) and not isinstance(value, type) for value in values.values())


def has_pairs(layer: Any) -> bool:
    """Whether a layer has pairs of its own, now or later."""
    return not _is_named(layer, *_WITHOUT)


def _is_named(value: Any, *names: str) -> bool:
    """Whether it is of a class of transformers' caches, and of no subclass."""
    return type(value).__module__ == "transformers.cache_utils" and type(value).__name__ in names


def has_tokens(layer: Any) -> bool:
    """Whether a layer has had tokens, and has their pairs."""
    return has_pairs(layer) and layer.is_initialized and layer.keys is not None


def filled(cache: Any) -> list[Any]:
    """The layers that have had tokens."""
    return [each for each in cache.layers if has_tokens(each)]


def put_handles(cache: Any, handles: Sequence[torch.Tensor]) -> None:
    """Give a session's handles to the layers that have had tokens."""
    for slot, layer in enumerate(filled(cache)):
        layer.keys, layer.values = handles[2 * slot : 2 * slot + 2]


def states_of(layer: Any) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """States of linear attention: attribute, key and tensor `[batch, ...]` of each."""
    for name, value in vars(layer).items():
        for key, each in value.items() if isinstance(value, dict) else ():
            if isinstance(each, torch.Tensor):
                yield name, key, each


def form_of(layer: Any) -> tuple[Any, ...]:
    """What a step depends on of a layer, but for the pairs and how many there are."""
    held = vars(layer)
    states = [each for value in held.values() if isinstance(value, dict) for each in value.values()]
    forms = [(each.dtype, each.shape[1:]) if isinstance(each, torch.Tensor) else each for each in states]
    return type(layer), held.get("sliding_window"), *forms


def length_of(layer: Any) -> int:
    """The tokens that a layer has had."""
    length = getattr(layer, "cumulative_length", None)
    return layer.keys.shape[2] if length is None else int(length)


def cache_of(out: Any) -> Any:
    """The growing cache that a module has made, in its output; None where there is none."""
    each = out if isinstance(out, tuple) else [getattr(out, "past_key_values", None)]
    return next((value for value in each if grows(value)), None)


def room_of(window: int, kv_len: int) -> int:
    """Tokens that a window has room for behind `kv_len` others, as far as graphs of a step depend on it: 0 to 3."""
    return max(0, min(3, window - kv_len))


def window_of(layer: Any) -> int | None:
    """The tokens of a layer's window; None where it keeps all."""
    return layer.sliding_window if layer.is_sliding else None


def shape_of(layer: Any) -> LayerShape:
    """The shape of a layer that has pairs."""
    return LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], window_of(layer))


@contextlib.contextmanager
def watched(cache: Any, enter: Callable[[int], None]) -> Iterator[None]:
    """Within the block, `enter` is called with a layer's number before its pairs are updated."""
    own, usual = vars(cache).get("update"), cache.update

    def update(key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        enter(layer_idx)
        return usual(key, value, layer_idx, *args, **kwargs)

    cache.update = update
    try:
        yield
    finally:
        del cache.update
        if own is not None:
            cache.update = own


def copied(cache: Any) -> Any:
    """A copy of a cache with layers, counts and states of its own; the pairs are the same."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                states = {
                    key: each.clone() if isinstance(each, torch.Tensor) else each
                    for key, each in value.items()
                }
                setattr(layer, name, states)
    return made
