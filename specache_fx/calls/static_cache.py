"""Calls on a static cache, as calls on a growing cache of the same session.

    static cache    buffers of all their rows, which become handles; a tensor counts the tokens; a mask has a column for
                    each row
    growing cache   handles of the tokens; a mask has a column for each token, and for those of the call

So the two share the graph of a step, and the prompts and turns without one. What a static cache can't do, such as to
take more tokens than it has rows, is left to a graph of its own: `fixed_runner.py` has the checks and the messages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from specache_fx.calls.call import Call
from specache_fx.calls.known_caches import is_static, length_of
from specache_fx.errors import CacheHandleError
from specache_fx.runners.base import inference
from specache_fx.runtime.handles.handle_form import HEADS_FIRST
from specache_fx.runtime.handles.handle_tensor import Handle, bare
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.fixed_buffers import Extent, are_held, are_intact, hold, refill, tokens


class GrowingCall:
    """A call on a static cache, with a growing one in its place.

    Args:
        call: The call.
        kv_len: Tokens of its cache.
        mask: Its mask for the tokens that there will be; None of all.

    Attributes:
        given: The call's arguments.
    """

    def __init__(self, call: Call, kv_len: int, mask: torch.Tensor | None) -> None:
        self._static, self._num_tokens = call.cache, call.num_tokens
        classes: Any = sys.modules[type(call.cache).__module__]
        self._cache = classes.DynamicCache()
        self._cache.layers = [classes.DynamicLayer() for _ in call.cache.layers]
        for layer, old in zip(self._cache.layers, call.cache.layers if kv_len else (), strict=False):
            with inference():
                layer.keys, layer.values = (
                    tokens(each, kv_len, HEADS_FIRST, each.shape[1], side=0, batch=call.batch, window=None)
                    for each in (old.keys, old.values)
                )
            layer.is_initialized, layer.dtype, layer.device = True, old.dtype, old.device
        self.given = {name: value for name, value in call.given.items() if name != "attention_mask"}
        self.given |= {"past_key_values": self._cache} | ({} if mask is None else {"attention_mask": mask})

    @classmethod
    def of(cls, call: Call, *, is_traced: bool) -> GrowingCall | None:
        """That of a call on a static cache; None of another call.

        Args:
            call: The call.
            is_traced: Prompts on this device are graphs.
        """
        if not is_static(call.cache) or torch.is_grad_enabled() or not call.num_tokens:
            return None
        if call.device != "cpu" and (is_traced or call.first_handle is not None):
            return None
        layers = call.cache.layers
        lengths = {length_of(layer) for layer in layers}
        if lengths == {0}:
            kv_len, mine = 0, [layer.keys.shape[0] for layer in layers if layer.is_initialized]
            fits = call.caches and set(mine) <= {call.batch}
        else:
            buffers = [side for layer in layers for side in (layer.keys, layer.values)]
            is_held = all(isinstance(side, Handle) for side in buffers)
            with inference(), bare():
                session = registry.find(buffers[0]) if is_held else None
            if session is None:
                return None
            kv_len = session.kv_len
            has_all = len(buffers) == 2 * len(session.shapes) and session.batch == call.batch
            fits = has_all and lengths == {kv_len} and are_intact(buffers)
        total, mask = kv_len + call.num_tokens, call.mask
        if not fits or min(layer.max_cache_len for layer in layers) < total or not call.has_served_mask:
            return None
        if mask is not None and (mask.shape[-1] < total or (mask.dim() == 4 and _shows(mask[..., total:]))):
            return None
        return cls(call, kv_len, None if mask is None else _columns(call, mask, total))

    def finish(self, out: Any) -> Any:
        """Give the static cache the call's tokens.

        Args:
            out: The call's output, with the growing cache.

        Returns:
            That, with the static one.

        Raises:
            CacheHandleError: If the call has given the cache pairs of another form.
        """
        sides = [side for layer in self._cache.layers for side in (layer.keys, layer.values)]
        with inference():
            for layer, own in zip(self._cache.layers, self._static.layers, strict=True):
                if not own.is_initialized:
                    own.lazy_initialization(layer.keys, layer.values)
        buffers = [side for layer in self._static.layers for side in (layer.keys, layer.values)]
        for side, buffer in zip(sides, buffers, strict=True):
            if (side.shape[1], side.shape[3]) != (buffer.shape[1], buffer.shape[3]):
                raise CacheHandleError(_OTHER_FORM)
        with inference():
            if not all(isinstance(side, Handle) for side in sides):
                # Without a rewritten graph there are numbers: buffers are plain, with these tokens first.
                whole = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in buffers]
                for full, side in zip(whole, sides, strict=True):
                    full[: side.shape[0], :, : side.shape[2]] = side
                refill(buffers, whole)
            elif not are_held(buffers, sides):
                hold(buffers, sides, [Extent(each.shape[2], each.shape[0], HEADS_FIRST) for each in buffers])
        for layer in self._static.layers:
            with torch.inference_mode(layer.cumulative_length.is_inference()):
                layer.cumulative_length.add_(self._num_tokens)
        if isinstance(out, tuple):
            return tuple(self._static if each is self._cache else each for each in out)
        for name, value in list(out.items()) if isinstance(out, Mapping) else ():
            if value is self._cache:
                out[name] = self._static
        return out


_OTHER_FORM = (
    "A step has given a static cache keys or values of another shape than its buffers have: the model's graph keeps"
    ' them in another form. Give the model a DynamicCache, or compile it with prompts="traced".'
)


def _shows(mask: torch.Tensor) -> bool:
    """Whether a mask shows a key."""
    return bool(mask.any() if mask.dtype == torch.bool else (mask > torch.finfo(mask.dtype).min / 2).any())


def _columns(call: Call, mask: torch.Tensor, total: int) -> torch.Tensor | None:
    """A mask's columns for so many tokens, in the form that `generate` gives with a growing cache."""
    mask = mask[..., :total]
    if call.num_tokens > 1 or not isinstance(call.given.get("position_ids"), torch.Tensor):
        return mask  # positions may be counted in it
    if mask.dtype.is_floating_point:
        return mask
    if bool(mask.all()):
        return None
    return mask if mask.dim() == 2 else mask[:, 0, 0].expand(call.batch, -1).long()
