"""A call of several tokens that runs as the model is: its layers' pairs go to the session, one behind the other.

A layer is stored when the next one is updated, so the 16-bit pairs of one layer are alive at a time. In a further turn
each layer's history comes back when it is updated. The session gets the new tokens, and quantises no token twice.

A prompt into a cache that doesn't say its layers beforehand is stored when it is through, with the pairs of all layers
alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from specache_fx.calls.call import Call
from specache_fx.calls.known_caches import (
    cache_of,
    copied,
    filled,
    grows,
    has_pairs,
    length_of,
    put_handles,
    shape_of,
    watched,
    window_of,
)
from specache_fx.config import SpecacheConfig
from specache_fx.direct.traced_values import Values, used_weights, values_of
from specache_fx.errors import CacheHandleError
from specache_fx.runners.base import inference
from specache_fx.runtime.handles.handle import unfit_reason
from specache_fx.runtime.handles.handle_tensor import Handle
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.native import openmp_spins
from specache_fx.runtime.session import claims, registry
from specache_fx.runtime.session.session import Session

_NO_CONSTANTS: Values = {}  # no graph is run


class Filling:
    """One call while it runs: the layers of its cache go to the session, one behind the other.

    Args:
        config: The options.
        module: It runs.
        call: Its arguments.
        session: The session that it goes on with; None at a prompt.
        past: The session's handles; empty at a prompt.
    """

    def __init__(
        self,
        config: SpecacheConfig,
        module: nn.Module,
        call: Call,
        session: Session | None,
        past: list[torch.Tensor],
    ) -> None:
        self._config, self._module, self._call, self._past = config, module, call, past
        self._session, self._is_prompt, self._old = session, session is None, 0
        self._streams = call.cache is not None and bool(call.cache.layers) and grows(call.cache)
        self._updated: int | None = None  # the layer that was updated last, not yet stored
        self._before = None if call.cache is None else copied(call.cache)
        # A prompt may leave layers without pairs: it is stored anew then.
        layers: Iterable[Any] = (
            filled(call.cache) if past else filter(has_pairs, call.cache.layers if self._streams else ())
        )
        self._slots = {id(layer): slot for slot, layer in enumerate(layers)}

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the module's forward, and put handles into its cache.

        Raises:
            Exception: What the forward raises. The cache is as before then.
        """
        openmp_spins.look()
        registry.sweep()
        with contextlib.ExitStack() as held:
            padding = None
            if (session := self._session) is not None:
                held.enter_context(session.lock)
                claims.check_open(session)  # another thread may have released it
                session.forget_lookahead()
                self._note(session)
                self._old, padding = session.kv_len, session.key_mask.at(session.kv_len)
            if self._streams:
                held.enter_context(watched(self._call.cache, self._enter))
            try:
                out = forward()
                cache = self._call.cache
                self._finish(cache_of(out) if cache is None else cache)
            except BaseException:
                self._undo()
                raise
            if session is not None and session.key_mask.shows(padding):
                with inference():
                    session.requantize()
            return out

    def _note(self, session: Session) -> None:
        """Note whose numbers the session gets."""
        session.origin.note(used_weights(self._module), _NO_CONSTANTS, values_of(self._module))

    def _enter(self, index: int) -> None:
        """A layer is about to be updated."""
        if index == self._updated or not self._streams or index >= len(self._call.cache.layers):
            return
        with inference():
            if self._updated is not None:
                self._store(self._updated)
            self._updated = index
            layer, session = self._call.cache.layers[index], self._session
            # The session has pairs of the calls before, or of this one, which updates the layer again.
            is_away = isinstance(layer.keys, torch.Tensor) and (
                isinstance(layer.keys, Handle) or layer.keys.is_meta
            )
            if session is not None and is_away:
                claims.check_open(session)  # a hook may have released it
                layer.keys, layer.values = session.load(self._slots[id(layer)])

    def _store(self, index: int) -> None:
        """A layer's new pairs go to the session, and its 16-bit tensors away."""
        layer = self._call.cache.layers[index]
        slot = self._slots.get(id(layer), -1)  # of a layer that the cache got in this call
        if self._session is None and self._is_prompt:
            shape = shape_of(layer)
            own = (each for each in self._call.cache.layers if has_pairs(each))
            shapes = tuple(shape._replace(window=window_of(each)) for each in own)
            self._session = self._opened(shapes, layer)
        session = self._session
        has_place = session is not None and slot >= 0 and session.shapes[slot] == shape_of(layer)
        if session is None or not has_place or session.device != layer.keys.device:
            self._stop_streaming()
            return
        self._take(session, slot, layer)

    def _take(self, session: Session, slot: int, layer: Any) -> None:
        """Store what a layer has got: as many tokens as it has grown by."""
        claims.check_open(session)
        length = length_of(layer)
        new = length - (session.layers[slot].kv_len if session.layers else 0)
        keys, values = (side[:, :, -new:] for side in (layer.keys, layer.values))
        kv_len = None if window_of(layer) is None else length
        mask = self._call.newest_mask
        session.store(slot, keys, values, None if mask is None else mask[..., :length], kv_len)
        # A forward that reads them once more gets an error of PyTorch's, and no other numbers.
        layer.keys, layer.values = (
            torch.empty_like(side, device="meta") for side in (layer.keys, layer.values)
        )

    def _stop_streaming(self) -> None:
        """The layers differ: those that were stored come back, and all are stored at the end.

        Raises:
            CacheHandleError: In a turn, whose layers are known.
        """
        if not self._is_prompt:
            raise CacheHandleError(_OTHER_LAYERS)
        self._streams = False
        if self._session is None:
            return
        for layer in filter(has_pairs, self._call.cache.layers):
            if layer.keys is not None and layer.keys.is_meta:
                layer.keys, layer.values = self._session.load(self._slots[id(layer)])
        self._session.close()
        self._session = None

    def _opened(self, shapes: tuple[LayerShape, ...], layer: Any) -> Session | None:
        """A session for a prompt; None where its tensors can't be handles."""
        sides = (layer.keys, layer.values)
        if any(unfit_reason(side.dtype, side.shape[3]) is not None for side in sides):
            return None
        session = registry.open_session(self._config, shapes, layer.keys.dtype, layer.keys.device)
        session.origin.layers_of_cache = True
        session.origin.model_config = getattr(self._module, "config", None)
        self._note(session)
        return session

    def _finish(self, cache: Any) -> None:
        if not grows(cache) or not (layers := filled(cache)):
            return  # it stays as the model made it
        if any(isinstance(layer.keys, Handle) for layer in layers) and self._is_prompt:
            return  # a module inside has filled a session
        with inference():
            if self._streams and self._updated is not None:
                self._store(self._updated)
            if self._is_prompt and (self._session is None or len(self._session.shapes) != len(layers)):
                self._store_all(layers)
            elif not self._is_prompt and len(layers) != len(self._slots):
                raise CacheHandleError(_OTHER_LAYERS)
            if (session := self._session) is None:
                return
            new = session.stored_length() - self._old
            ids = self._call.token_ids
            session.remember(ids if ids is not None and ids.shape[1] == new else None)
            session.advance(new, decoded=False)
            put_handles(
                cache, registry.issue(session) if self._is_prompt else registry.resized(session, self._past)
            )

    def _store_all(self, layers: Sequence[Any]) -> None:
        """Store a prompt that is through. It stays as the model made it where no session can have it."""
        self._stop_streaming()
        if len({layer.keys.device for layer in layers}) > 1:
            return
        self._session = session = self._opened(tuple(map(shape_of, layers)), layers[0])
        if session is not None:
            for slot, layer in enumerate(layers):
                self._take(session, slot, layer)

    def _undo(self) -> None:
        """Leave the cache as it was before a call that failed."""
        if self._is_prompt and self._session is not None:
            self._session.close()
        if self._before is None:
            return
        layers = self._call.cache.layers
        del layers[len(self._before.layers) :]
        for layer, before in zip(layers, self._before.layers, strict=True):
            vars(layer).update(vars(before))
        if self._past:
            put_handles(self._call.cache, self._past)


_OTHER_LAYERS = (
    "A call updates other layers than those that its KV cache has, or layers of other shapes or on another device."
    " Start from the prompt: a cache keeps the layers that it begins with."
)
