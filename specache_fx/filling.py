"""A call of several tokens that runs as the model is: its layers' pairs go to the session, one behind the other.

A layer is stored when the next one is updated, so the 16-bit pairs of one layer are alive at a time. In a further turn
each layer's history comes back when it is updated. The session gets the new tokens, and quantises no token twice. A
prompt whose cache doesn't say its layers beforehand is stored when it is through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specache_fx.config import SpecacheConfig
from specache_fx.known_caches import (
    Before,
    cache_of,
    filled,
    grows,
    has_pairs,
    is_new_static,
    is_static,
    length_of,
    put_handles,
    shape_of,
    watched,
    window_of,
)
from specache_fx.runners import inference
from specache_fx.runtime import claims, registry
from specache_fx.runtime.handle import unfit_reason
from specache_fx.runtime.handle_tensor import Handle, bare
from specache_fx.runtime.layout import LayerShape
from specache_fx.runtime.session import Session
from specache_fx.traced_values import values_of


class Call:
    """The arguments of one call, by name."""

    def __init__(self, given: Mapping[str, Any], config: Any) -> None:
        self.cache: Any = given.get("past_key_values")
        self.mask: Any = given.get("attention_mask")
        tokens, embeds = given.get("input_ids"), given.get("inputs_embeds")
        self.token_ids = tokens if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 else None
        self.num_tokens = next(
            (x.shape[1] for x in (tokens, embeds) if isinstance(x, torch.Tensor) and x.dim() > 1), 0
        )
        self.batch = next((x.shape[0] for x in (tokens, embeds) if isinstance(x, torch.Tensor)), 0)
        self._shows_attention = bool(given.get("output_attentions"))
        self.tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
        uses_cache = given.get("use_cache")
        self._caches = getattr(config, "use_cache", False) if uses_cache is None else uses_cache

    @property
    def must_trace(self) -> bool:
        """Whether it has to go to the compiled forward: one token of a sequence, or what is not served here."""
        if not self._caches or not self.num_tokens or torch.is_grad_enabled():
            return True
        if self.cache is not None and not grows(self.cache) and not is_new_static(self.cache):
            return True
        if self.num_tokens == 1 and self.cache is not None and self.cache.get_seq_length():
            return True
        return not (self.mask is None or (isinstance(self.mask, torch.Tensor) and self.mask.dim() in (2, 4)))

    @property
    def is_usual(self) -> bool:
        """Whether a model whose graph of this call is left alone has all of them left alone."""
        return not self._shows_attention and not torch.is_grad_enabled() and self.mask is None

    @property
    def first_handle(self) -> Handle | None:
        """The first keys of a cache that is a session's; None of another."""
        layers = getattr(self.cache, "layers", ())  # the first one tells, at each step
        pairs = (getattr(layer, "keys", None) for layer in layers)
        keys = next((keys for keys in pairs if keys is not None), None)
        return keys if isinstance(keys, Handle) else None

    def give_mask(self) -> torch.Tensor:
        """Give a call that has no mask one that hides nothing: `[batch, kv_len]`, new tokens included."""
        kv_len = self.cache.get_seq_length() + self.num_tokens
        self.mask = torch.ones(self.batch, kv_len, dtype=torch.int64, device=self.tensors[0].device)
        self.tensors.append(self.mask)
        return self.mask

    def mark_sizes(self) -> None:
        """Tell Dynamo which sizes vary from step to step: the batch, of one row too, and the length of a mask."""
        for each in self.tensors:
            if each.dim() and each.shape[0] == self.batch:
                torch._dynamo.maybe_mark_dynamic(each, 0)
            for dim in range(1, each.dim() - (each is self.mask)):
                if each.shape[dim] == 1:
                    torch._dynamo.mark_static(each, dim)
        if isinstance(self.mask, torch.Tensor):
            # The first graph is a step's: Dynamo has seen no mask of another length.
            torch._dynamo.maybe_mark_dynamic(self.mask, self.mask.dim() - 1)

    def take_past(self, config: SpecacheConfig) -> tuple[Session | None, list[torch.Tensor]] | None:
        """Claim the session that the call goes on with; see `claims.go_on`.

        Returns:
            The session and its handles: None and none at a prompt. None where the call has to be traced.
        """
        layers = filled(self.cache) if grows(self.cache) else []
        tensors = [side for layer in layers for side in (layer.keys, layer.values)]
        if not tensors:
            return None, []
        with inference(), bare():
            session = registry.find(tensors[0])
            in_order = [[(slot, slot) for slot in range(len(tensors))]]
            # A graph may have laid the cache out in another way, or several share it.
            if session is None or list(claims.by_session(tensors).values()) != in_order:
                return None
            if len(tensors) != 2 * len(session.shapes):
                return None
            return claims.go_on(tensors, config.for_device(session.device.type), session.shapes)

    @property
    def newest_mask(self) -> torch.Tensor | None:
        """The mask's last row, as `Session.store` takes it."""
        if self.mask is None or self.mask.dim() == 2:
            return None if self.mask is None else self.mask[:, None].bool()
        row: torch.Tensor = self.mask[..., -1, :]
        return row


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
        # Where layers are not known beforehand, and where all of a buffer is there, it is stored when it is through.
        self._streams = call.cache is not None and bool(call.cache.layers) and grows(call.cache)
        self._updated: int | None = None  # the layer that was updated last, not yet stored
        self._before = Before(call.cache)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the module's forward, and put handles into its cache.

        Raises:
            Exception: What the forward raises. The cache is as before then.
        """
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
        session.origin.note(self._module.named_parameters(), values_of(self._module))

    def _enter(self, index: int) -> None:
        """A layer is about to be updated."""
        if index == self._updated or not self._streams:
            return
        with inference():
            if self._updated is not None:
                self._store(self._updated)
            self._updated = index
            layer = self._call.cache.layers[index]
            if self._session is not None and isinstance(layer.keys, torch.Tensor) and self._is_away(layer):
                claims.check_open(self._session)  # a hook may have released it
                layer.keys, layer.values = self._session.load(self._slot(index))

    def _is_away(self, layer: Any) -> bool:
        """Whether the session has a layer's pairs: of the calls before, or of this one, which updates it again."""
        return isinstance(layer.keys, Handle) or layer.keys.is_meta

    def _slot(self, index: int) -> int:
        """The session's layer of a layer of the cache."""
        return index - sum(not has_pairs(layer) for layer in self._call.cache.layers[:index])

    def _store(self, index: int) -> None:
        """A layer's new pairs go to the session, and its 16-bit tensors away."""
        layer, slot = self._call.cache.layers[index], self._slot(index)
        if self._session is None and self._is_prompt:
            shape = shape_of(layer)
            own = (each for each in self._call.cache.layers if has_pairs(each))
            alike = tuple(replace(shape, window=window_of(each)) for each in own)
            self._session = self._opened(alike, layer)
        session = self._session
        is_alike = session is not None and session.shapes[slot : slot + 1] == (shape_of(layer),)
        if session is None or not is_alike or session.device != layer.keys.device:
            self._stop_streaming()
            return
        self._take(session, slot, layer)

    def _take(self, session: Session, slot: int, layer: Any) -> None:
        """Store what a layer has got: as many tokens as it has grown by."""
        claims.check_open(session)
        length, is_static_layer = length_of(layer), is_static(self._call.cache)
        new = length - (session.layers[slot].kv_len if session.layers else 0)
        there = slice(length - new, length) if is_static_layer else slice(-new, None)
        keys, values = (side[:, :, there] for side in (layer.keys, layer.values))
        kv_len = None if window_of(layer) is None else length
        mask = self._call.newest_mask
        session.store(slot, keys, values, None if mask is None else mask[..., :length], kv_len)
        if not is_static_layer:
            # A forward that reads them once more gets an error of PyTorch's, and no other numbers.
            layer.keys, layer.values = (
                torch.empty_like(side, device="meta") for side in (layer.keys, layer.values)
            )

    def _stop_streaming(self) -> None:
        """The layers are not alike: those that were stored come back, and all are stored at the end."""
        self._streams = False
        if self._session is None:
            return
        for index, layer in enumerate(self._call.cache.layers):
            if layer.keys is not None and layer.keys.is_meta:
                layer.keys, layer.values = self._session.load(self._slot(index))
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
        if not (grows(cache) or is_static(cache)) or not (layers := filled(cache)):
            return  # it stays as the model made it
        if any(isinstance(layer.keys, Handle) for layer in layers) and self._is_prompt:
            return  # a module inside has filled a session
        with inference():
            if self._streams and self._updated is not None:
                self._store(self._updated)
            if self._is_prompt and (self._session is None or len(self._session.shapes) != len(layers)):
                self._store_all(layers)
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
        for slot, layer in enumerate(layers if session is not None else ()):
            assert session is not None
            self._take(session, slot, layer)

    def _undo(self) -> None:
        """Leave the cache as it was before a call that failed."""
        if self._is_prompt and self._session is not None:
            self._session.close()
        self._before.restore(self._past)
