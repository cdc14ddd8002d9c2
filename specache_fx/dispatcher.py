"""Which calls of a module run as the model is, and which go to its compiled forward (`prompts="auto"`, `"untraced"`).

    module(...)   several tokens  ->  the module's own forward; each layer's pairs go to the session
                  one token       ->  the compiled call, which decodes from the session

A prompt needs no graph: its attention is the model's own in any case. Dynamo traces the decode step alone.

This serves caches of transformers whose layers grow by concatenation, windows included. All else is traced: other
caches, masks by layer, gradients, a cache that several graphs share. The model's own attention makes a mask of all
queries and keys where there is padding, a window or a history; a traced prompt attends by blocks there.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specache_fx.config import SpecacheConfig
from specache_fx.dynamo_hooks import Step
from specache_fx.filling import Call, Filling
from specache_fx.known_caches import grows, put_handles
from specache_fx.runners import inference
from specache_fx.runtime import registry
from specache_fx.runtime.handle_form import is_laid_out
from specache_fx.runtime.handle_tensor import Handle, bare
from specache_fx.runtime.layout import LayerShape

_here = threading.local()


class Dispatcher:
    """What a module calls in place of its compiled forward.

    Args:
        module: The module; it holds this.
        compiled: Its compiled forward.
        config: The options of its graphs. With `prompts="auto"`, prompts are traced on a GPU, and from the first step
            on that shows that little is won: the model's graphs are left alone, or have other layers than its cache.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], config: SpecacheConfig) -> None:
        self._module, self.compiled, self._config = weakref.ref(module), compiled, config
        self._names = tuple(inspect.signature(module.forward).parameters)
        self._traces = "past_key_values" not in self._names
        self._is_auto, self._stepped = config.prompts == "auto", False
        # Steps of one row without a mask have a graph of their own where they come first: it is traced in two thirds of
        # the time. All other steps share one: batches of any size, padded or not, and beams.
        self._has_single, self._has_open = False, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        module = self._module()
        assert module is not None
        if self._traces or torch.compiler.is_compiling():
            return self.compiled(*args, **kwargs)
        call = Call({**dict(zip(self._names, args, strict=False)), **kwargs}, getattr(module, "config", None))
        filling: list[Any] = _here.__dict__.setdefault("filling", [])
        if call.cache is not None and any(call.cache is each for each in filling):
            return module._call_impl(*args, **kwargs)  # for a module around this one
        if call.must_trace:
            return self._traced(call, args, kwargs)
        if self._is_auto and not _is_on_cpu(module):
            return self.compiled(*args, **kwargs)
        past = call.take_past(self._config)
        if past is None:
            return self.compiled(*args, **kwargs)
        filling.append(call.cache)
        try:
            return Filling(self._config, module, call, *past).run(lambda: module._call_impl(*args, **kwargs))
        finally:
            filling.pop()

    def _traced(self, call: Call, args: Any, kwargs: Any) -> Any:
        handle = call.first_handle
        if handle is None:
            return self.compiled(*args, **kwargs)
        if not is_laid_out(handle) and grows(call.cache) and (past := call.take_past(self._config)):
            # Rows were moved: copies have another layout. A session's own handles need no graph of their own.
            put_handles(call.cache, past[1])
        is_usual = call.is_usual
        shapes = _shapes(handle) if is_usual and not self._stepped else None
        out = self._step(call, args, kwargs)
        if is_usual:
            handle = call.first_handle
            self._traces = handle is None  # its graphs are left alone: they had the handles' numbers back
            if shapes is not None:
                self._stepped = True
                self._traces |= self._is_auto and handle is not None and _shapes(handle) != shapes
        return out

    def _step(self, call: Call, args: Any, kwargs: Any) -> Any:
        is_single = call.batch == 1 and call.mask is None
        if is_single and (self._has_single or not self._has_open):
            self._has_single = True
            with Step(is_batch_open=False):
                return self.compiled(*args, **kwargs)
        self._has_open = True
        if call.mask is None and "attention_mask" in self._names and grows(call.cache):
            kwargs = {**kwargs, "attention_mask": call.give_mask()}
        call.mark_sizes()
        with Step(is_batch_open=True):
            return self.compiled(*args, **kwargs)


def _shapes(handle: Handle) -> tuple[LayerShape, ...]:
    """The layers of a handle's session."""
    with inference(), bare():
        session = registry.find(handle)
    return () if session is None else session.shapes


def _is_on_cpu(module: nn.Module) -> bool:
    weight = next(module.parameters(), None)
    return weight is None or weight.device.type == "cpu"
