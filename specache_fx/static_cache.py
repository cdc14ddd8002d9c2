"""Calls on a static cache that has tokens, as calls on a growing cache of the same session.

    static cache    buffers are handles of all their rows; a tensor counts the tokens; a mask has a column for each row
    growing cache   handles of the tokens; a mask has a column for each token, and for those of the call

So the two share the graph of a step, and the turns without one. What a static cache can't do, such as to take more
tokens than it has rows, is left to a graph of its own: `fixed_runner.py` has the checks and the messages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specache_fx.call import Call
from specache_fx.errors import CacheHandleError
from specache_fx.known_caches import is_held_static, length_of, put_handles
from specache_fx.runners import inference
from specache_fx.runtime import registry
from specache_fx.runtime.fixed_buffers import are_held, are_intact, refill, tokens
from specache_fx.runtime.handle_form import HEADS_FIRST
from specache_fx.runtime.handle_tensor import Handle, bare


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
        self._buffers = [side for layer in call.cache.layers for side in (layer.keys, layer.values)]
        with inference():
            heads_first = [
                tokens(each, kv_len, HEADS_FIRST, each.shape[1], side=0, batch=call.batch, window=None)
                for each in self._buffers
            ]
        sides = iter(heads_first)
        classes: Any = sys.modules[type(call.cache).__module__]
        self._cache = classes.DynamicCache()
        for old in call.cache.layers:
            layer = classes.DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = next(sides), next(sides), True
            layer.dtype, layer.device = old.dtype, old.device
            self._cache.layers.append(layer)
        self.given = {name: value for name, value in call.given.items() if name != "attention_mask"}
        self.given |= {"past_key_values": self._cache} | ({} if mask is None else {"attention_mask": mask})

    @classmethod
    def of(cls, call: Call) -> GrowingCall | None:
        """That of a call on a static cache whose tokens are all those of a session; None of another call."""
        if not is_held_static(call.cache) or call.device != "cpu" or torch.is_grad_enabled():
            return None
        layers = call.cache.layers
        buffers = [side for layer in layers for side in (layer.keys, layer.values)]
        with inference(), bare():
            session = registry.find(buffers[0])
        if session is None or session.batch != call.batch or len(buffers) != 2 * len(session.shapes):
            return None
        kv_len = session.kv_len
        total = kv_len + call.num_tokens
        if (
            {length_of(layer) for layer in layers} != {kv_len}
            or not call.num_tokens
            or not are_intact(buffers)
        ):
            return None
        if min(side.shape[2] for side in buffers) < total or not call.has_served_mask:
            return None
        mask = call.mask
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
        for side, buffer in zip(sides, self._buffers, strict=True):
            if (side.shape[1], side.shape[3]) != (buffer.shape[1], buffer.shape[3]):
                raise CacheHandleError(_OTHER_FORM)
        with inference():
            if not all(isinstance(side, Handle) for side in sides):
                self._fill(sides)  # the graph was left alone: it gives numbers back
            elif not are_held(self._buffers, sides):
                put_handles(self._static, sides)
        for layer in self._static.layers:
            with torch.inference_mode(layer.cumulative_length.is_inference()):
                layer.cumulative_length.add_(self._num_tokens)
        if isinstance(out, tuple):
            return tuple(self._static if each is self._cache else each for each in out)
        for name, value in list(out.items()) if isinstance(out, Mapping) else ():
            if value is self._cache:
                out[name] = self._static
        return out

    def _fill(self, sides: Sequence[torch.Tensor]) -> None:
        """Make the buffers plain tensors again, with these tokens first."""
        whole = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in self._buffers]
        for full, side in zip(whole, sides, strict=True):
            full[: side.shape[0], :, : side.shape[2]] = side
        refill(self._buffers, whole)


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
