"""The arguments of one call of a model, as `dispatcher.py` and `filling.py` need them."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from specache_fx.calls.known_caches import (
    filled,
    form_of,
    grows,
    has_own_methods,
    length_of,
    room_of,
)
from specache_fx.config import SpecacheConfig
from specache_fx.runners.base import inference
from specache_fx.runtime.handles.handle_form import is_laid_out
from specache_fx.runtime.handles.handle_tensor import Handle, bare
from specache_fx.runtime.session import claims, registry
from specache_fx.runtime.session.session import Session

_BY_ROW = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")  # arguments with the batch first


class Call:
    """One call of a model.

    Args:
        names: Of all parameters, in order.
        args: Arguments by position.
        kwargs: Arguments by name.
        config: The model's config, with its `use_cache`; None where it has none.

    Attributes:
        given: All arguments by name.
    """

    def __init__(
        self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], config: Any
    ) -> None:
        self._names, self._config, self.args, self.kwargs = names, config, args, kwargs
        self.given = given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.cache: Any = given.get("past_key_values")
        self.mask: Any = given.get("attention_mask")
        tokens, embeds = given.get("input_ids"), given.get("inputs_embeds")
        self.token_ids = tokens if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 else None
        tensor = next((x for x in (tokens, embeds) if isinstance(x, torch.Tensor) and x.dim() > 1), None)
        self.batch, self.num_tokens = (0, 0) if tensor is None else tensor.shape[:2]
        self.device = "cpu" if tensor is None else tensor.device.type
        uses_cache = given.get("use_cache")
        self.caches = getattr(config, "use_cache", False) if uses_cache is None else uses_cache

    def having(self, given: Mapping[str, Any]) -> Call:
        """The same call with other values of its arguments."""
        rest = dict(given)
        args = [rest.pop(name) for name in self._names[: len(self.args)]]
        return Call(self._names, args, rest, self._config)

    @property
    def is_step(self) -> bool:
        """Whether it decodes one token of each row from a session."""
        return self.num_tokens == 1 and not torch.is_grad_enabled() and self.first_handle is not None

    @property
    def is_served(self) -> bool:
        """Whether it can run as the model is, and fill a session."""
        if not self.caches or not self.num_tokens or torch.is_grad_enabled():
            return False
        if self.cache is not None and not grows(self.cache):
            return False
        if self.num_tokens == 1 and self.cache is not None and any(map(length_of, filled(self.cache))):
            return False  # a step from a cache of numbers
        return self.has_served_mask

    @property
    def has_served_mask(self) -> bool:
        """Whether it has no mask, or one for all layers and heads."""
        if self.mask is None or not isinstance(self.mask, torch.Tensor):
            return self.mask is None
        return self.mask.dim() == 2 or (self.mask.dim() == 4 and self.mask.shape[1] == 1)  # one for all heads

    @property
    def asks_for_more(self) -> bool:
        """Whether its graph may be left alone for what it is given, and others of the model are not."""
        return bool(self.given.get("output_attentions")) or self.mask is not None

    @property
    def first_handle(self) -> Handle | None:
        """The first keys of a cache that is a session's; None of another."""
        layers = getattr(self.cache, "layers", ())  # the first one tells, at each step
        pairs = (getattr(layer, "keys", None) for layer in layers)
        keys = next((keys for keys in pairs if keys is not None), None)
        return keys if isinstance(keys, Handle) else None

    @property
    def handle_dtype(self) -> torch.dtype | None:
        """Of a cache that has a session's own handles; None of copies, which lie otherwise, and of other caches."""
        handle = self.first_handle
        with bare():
            return handle.dtype if handle is not None and is_laid_out(handle) else None

    @property
    def session(self) -> Session | None:
        """The session of its cache."""
        handle = self.first_handle
        with inference(), bare():
            return None if handle is None else registry.find(handle)

    @property
    def newest_mask(self) -> torch.Tensor | None:
        """The mask's last row, as `Session.store` takes it."""
        if self.mask is None or self.mask.dim() == 2:
            return None if self.mask is None else self.mask[:, None].bool()
        row: torch.Tensor = self.mask[..., -1, :]
        return row

    @property
    def has_containers(self) -> bool:
        """Whether a list, dict or set is among the arguments, to which the model may write."""
        return any(isinstance(each, (list, dict, set)) for each in self.given.values())

    @functools.cached_property
    def form(self) -> tuple[Hashable, ...] | None:
        """What tells one graph of a step from another, but for sizes; None of a step that Dynamo alone can trace."""
        if torch._C._len_torch_function_stack() or _len_torch_dispatch_stack():
            return None
        dtype = self.handle_dtype
        if dtype is None or not grows(self.cache) or has_own_methods(self.cache):
            return None
        forms: list[Hashable] = []
        for name, value in sorted(self.given.items()):
            if type(value) is torch.Tensor:
                rows = "one" if self.batch < 2 else None
                shape = [
                    rows if dim == 0 and size == self.batch else size for dim, size in enumerate(value.shape)
                ]
                if name == "attention_mask":
                    if value.dim() < 2 or value.shape[0] != self.batch:
                        return None
                    shape[-1] = None
                forms.append((name, value.dtype, value.device, *shape))
            elif value is None or isinstance(value, (bool, int, str)):
                forms.append((name, value))
            elif value is not self.cache:
                return None
        cast = torch.get_autocast_dtype(self.device) if torch.is_autocast_enabled(self.device) else None
        modes = torch.is_inference_mode_enabled(), cast, torch.get_default_dtype()
        return (*forms, *modes, dtype, *map(form_of, self.cache.layers))

    @property
    def kind(self) -> Hashable:
        """`form` without its numbers, which may count; and what else Dynamo has graphs for, as far as is known."""
        # A window that is full has a graph of its own, and so have the last two tokens that it has room for.
        windows = [each for each in self.cache.layers if getattr(each, "is_sliding", False)]
        rooms = {(each.sliding_window, room_of(each.sliding_window, length_of(each))) for each in windows}
        return loosely(self.form), self.batch, frozenset(rooms)

    def mark_sizes(self) -> None:
        """Tell Dynamo which sizes vary from step to step, but for a batch of one: the batch, and a mask's length."""
        given = (self.given.get(name) for name in _BY_ROW)
        layers = filled(self.cache) if grows(self.cache) else []
        for tensor in (*given, *(side for layer in layers for side in (layer.keys, layer.values))):
            # Positions of M-RoPE are [3, batch, q_len].
            if isinstance(tensor, torch.Tensor) and tensor.shape[0] == self.batch:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        if isinstance(self.mask, torch.Tensor):
            # The first graph is a step's: Dynamo has seen no mask of another length.
            torch._dynamo.maybe_mark_dynamic(self.mask, self.mask.dim() - 1)

    def take_past(self, config: SpecacheConfig) -> tuple[Session | None, list[torch.Tensor]] | None:
        """Claim the session that the call goes on with; see `claims.resolve`.

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
            return claims.resolve(tensors, config.for_device(session.device.type), session.shapes)


def loosely(form: Any) -> Hashable:
    """A form without its numbers, which may differ from call to call."""
    if isinstance(form, tuple):
        return tuple(map(loosely, form))
    return None if type(form) is int else form
