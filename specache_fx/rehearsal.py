"""Decode steps like a given one, on a small KV cache of their own: they make the graph that the given one needs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specache_fx.known_caches import filled, put_handles
from specache_fx.runners import inference
from specache_fx.runtime import registry
from specache_fx.runtime.session import Session

_LENGTH = 8  # tokens of the cache: Dynamo makes graphs of their own for sizes of 0 and 1
_STEPS = 6  # at most: sizes that vary unannounced do so at the third
_POSITIONS = ("position_ids", "cache_position")


class Rehearsal:
    """Steps with the arguments of a call, but for the cache and what grows with it.

    Args:
        args: The call's arguments by position.
        kwargs: Those by name.
        names: The names of all, in order.
        session: The session of the call's cache.

    Raises:
        Exception: If the cache can't be copied.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], session: Session
    ) -> None:
        self._by_place = names[: len(args)]
        self._given = {**dict(zip(names, args, strict=False)), **kwargs}
        windows = [shape.window for shape in session.shapes if shape.window is not None]
        # Graphs of a window that is full are others.
        full = [window + _LENGTH for window in windows if session.kv_len >= window]
        self._length = min(session.kv_len, max((_LENGTH, *full)))
        self._cache = _structure_of(self._given["past_key_values"])
        self._fill(session)
        self._given = {name: self._shortened(name, value) for name, value in self._given.items()}
        self._modes = _modes()

    def run(self, step: Callable[[Sequence[Any], Mapping[str, Any]], bool]) -> None:
        """Run steps until one is not traced.

        Args:
            step: Runs one with these arguments, by position and by name. Returns whether Dynamo traced it.
        """
        with self._modes():
            for _ in range(_STEPS):
                given = dict(self._given)
                if not step([*map(given.pop, self._by_place)], given):
                    return
                self._go_on()

    def _fill(self, like: Session) -> None:
        """Give the cache a session with random pairs."""
        assert like.batch is not None
        with inference():
            session = registry.open_session(like.config, like.shapes, like.dtype, like.device)
            session.origin = like.origin.copy()
            draw = torch.Generator(like.device).manual_seed(0)  # the caller's random numbers stay as they are
            for slot, (layer, shape) in enumerate(zip(filled(self._cache), like.shapes, strict=True)):
                keys, values = (
                    torch.randn(
                        (like.batch, shape.num_kv_heads, shape.tokens(self._length), dim),
                        generator=draw,
                        device=like.device,
                    ).to(like.dtype)
                    for dim in (shape.key_dim, shape.value_dim)
                )
                session.store(slot, keys, values, None, None if shape.window is None else self._length)
                if shape.window is not None:
                    layer.cumulative_length = self._length
            session.advance(self._length, decoded=False)
            put_handles(self._cache, registry.issue(session))

    def _shortened(self, name: str, value: Any) -> Any:
        if name == "past_key_values":
            return self._cache
        if not isinstance(value, torch.Tensor):
            return value
        if name == "attention_mask":
            value = value[..., -self._length - 1 :]
        return value.clamp(max=self._length) if name in _POSITIONS else value.clone()

    def _go_on(self) -> None:
        """The arguments of the next step."""
        for name, value in self._given.items():
            if name == "attention_mask" and isinstance(value, torch.Tensor):
                self._given[name] = torch.cat([value, value[..., -1:]], -1)
            elif name in _POSITIONS and isinstance(value, torch.Tensor):
                self._given[name] = value + 1


def _structure_of(cache: Any) -> Any:
    """A copy of a cache without its pairs: its layers have the same tensors, and states of their own."""
    pairs = {id(side): side for layer in filled(cache) for side in (layer.keys, layer.values)}
    return copy.deepcopy(cache, pairs)


def _modes() -> Callable[[], contextlib.ExitStack]:
    """The modes of this thread that Dynamo's graphs depend on, for another thread."""
    infers, grads = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    casts = {
        kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    }

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.inference_mode(infers) if infers else torch.set_grad_enabled(grads))
        for kind, dtype in casts.items():
            stack.enter_context(torch.autocast(kind, dtype))
        return stack

    return enter
