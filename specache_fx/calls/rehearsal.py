"""Decode steps like a given one, on a small KV cache of their own: they make the graph that the given one needs.

They run the caller's module: a counter in it counts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specache_fx.calls.call import Call
from specache_fx.calls.known_caches import copied, filled, length_of, put_handles, room_of
from specache_fx.direct.model_state import has_hooks
from specache_fx.runners.base import inference
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.session import Session

_LENGTH = 8  # tokens of the cache: Dynamo makes graphs of their own for sizes of 0 and 1
_STEPS = 6  # at most: sizes that vary unannounced do so at the third
_POSITIONS = ("position_ids", "cache_position")
_BY_LENGTH = ("dynamic", "longrope")  # kinds of RoPE whose frequencies a call writes into the module


class Rehearsal:
    """Steps with the arguments of a call, but for the cache and what grows with it.

    Args:
        call: The call.
        session: The session of its cache.

    Raises:
        Exception: If the cache can't be copied, or memory is short.
    """

    def __init__(self, call: Call, session: Session) -> None:
        self._given = {**call.given}
        kv_len = max(map(length_of, filled(call.cache)))
        windows = [shape.window for shape in session.shapes if shape.window is not None]
        # Graphs of a window that is full, or nearly, are others.
        full = [_LENGTH + window for window in windows if room_of(window, kv_len) < room_of(window, 0)]
        self._length = min(kv_len, max((_LENGTH, *full)))
        self._given["past_key_values"] = cache = copied(call.cache)
        self._session = _filled_session(session, cache, call.batch, self._length)
        if isinstance(call.mask, torch.Tensor):
            self._given["attention_mask"] = call.mask[..., -self._length - 1 :].clone()
        self._call = call.having(self._given)  # the caller's own would keep its cache alive
        # Those of this thread that Dynamo's graphs depend on, for another thread. A step has no gradients.
        cast = torch.get_autocast_dtype(call.device), torch.is_autocast_enabled(call.device)
        self._modes = (
            torch.inference_mode(torch.is_inference_mode_enabled()),
            torch.no_grad(),
            torch.autocast(call.device, cast[0], enabled=cast[1]),
        )

    def run(self, step: Callable[[Call], bool]) -> None:
        """Run steps until one is not traced.

        Args:
            step: Runs one. Returns whether Dynamo traced it.
        """
        try:
            with contextlib.ExitStack() as modes:
                for mode in self._modes:
                    modes.enter_context(mode)
                for done in range(_STEPS):
                    given = {name: self._grown(name, value, done) for name, value in self._given.items()}
                    if not step(self._call.having(given)):
                        return
        finally:
            del self._given, self._call
            with self._session.lock:
                self._session.close()

    def _grown(self, name: str, value: Any, done: int) -> Any:
        """An argument of the step after so many others."""
        if not isinstance(value, torch.Tensor):
            return value
        if name == "attention_mask":
            return torch.cat([value, *[value[..., -1:]] * done], -1)
        if name not in _POSITIONS:
            return value
        if value.is_contiguous():
            return value + done
        before = self._length + done  # a slice of all positions: its stride grows
        return F.pad(value + done, (before, 0))[..., before:]


def fits(call: Call, module: nn.Module) -> bool:
    """Whether steps like a call can run beside it, unseen by the caller.

    The cache grows, and nobody watches it. One mask serves all heads. No argument takes results. No mode is of this
    thread alone, such as a default device. No hook sees the module's calls. No call writes frequencies of RoPE.
    """
    config: Any = getattr(module, "config", None)
    if call.form is None or not call.has_served_mask or call.has_containers or has_hooks(module):
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *rope.values()]  # perhaps one for each kind of layer
    return not any(isinstance(each, Mapping) and each.get("rope_type") in _BY_LENGTH for each in kinds)


def _filled_session(like: Session, cache: Any, batch: int, length: int) -> Session:
    """A session for a cache, with pairs of zeros."""
    with inference():
        session = registry.open_session(like.config, like.shapes, like.dtype, like.device)
        session.origin = like.origin.copy()
        for slot, (layer, shape) in enumerate(zip(filled(cache), like.shapes, strict=True)):
            sizes = (batch, shape.num_kv_heads, shape.tokens(length))
            keys, values = (
                torch.zeros(*sizes, dim, dtype=like.dtype, device=like.device)
                for dim in (shape.key_dim, shape.value_dim)
            )
            session.store(slot, keys, values, None, None if shape.window is None else length)
            if shape.window is not None:
                layer.cumulative_length = length
        session.advance(length, decoded=False)
        put_handles(cache, registry.issue(session))
    return session
