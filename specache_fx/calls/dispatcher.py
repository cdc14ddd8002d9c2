"""Which calls of a module run as the model is, and which go to its compiled forward.

    module(...)   several tokens  ->  the module's own forward; each layer's pairs go to the session
                  one token       ->  a graph, which decodes from the session: a direct step (`direct_step.py`), else
                                      the compiled call. While it is made in the background: as several tokens

A prompt needs no graph: its attention is the model's own in any case. The decode step alone is traced.

This serves the caches of `known_caches.py`. All else is traced: other caches, masks by layer, gradients, a cache that
several graphs share. The model's own attention makes a mask of all queries and keys where there is padding, a window or
a history; a traced prompt attends by blocks there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from specache_fx.backend import specache
from specache_fx.calls.background import Background, beside
from specache_fx.calls.call import Call
from specache_fx.calls.filling import Filling
from specache_fx.calls.known_caches import grows, put_handles
from specache_fx.calls.rehearsal import Rehearsal, fits
from specache_fx.calls.static_cache import GrowingCall
from specache_fx.calls.this_thread import having, here
from specache_fx.config import SpecacheConfig
from specache_fx.direct.direct_step import DirectSteps
from specache_fx.errors import ConfigError
from specache_fx.runtime.session.session import Session

Prompts = Literal["auto", "traced", "untraced"]
Warm = Literal["block", "background"]


def runs_untraced(prompts: str, warm: str, config: SpecacheConfig) -> bool:
    """Whether a module with these options gets a `Dispatcher`.

    Raises:
        ConfigError: If `prompts` or `warm` is not valid, or the options need graphs of prompts.
    """
    for name, given, known in (("prompts", prompts, Prompts), ("warm", warm, Warm)):
        if given not in get_args(known):
            raise ConfigError(
                f"{name}={given!r} is not valid: choose one of {', '.join(map(repr, get_args(known)))}."
            )
    reason = None
    if not config.placement.offload:
        # A graph that lays the cache out in another way could not have its numbers back.
        reason = f"policy={config.policy!r}, whose codes are all that is kept"
    elif config.compile_prefill:
        reason = "compile_prefill=True"
    if reason is not None and prompts == "untraced":
        raise ConfigError(f'prompts="untraced" contradicts {reason}: leave one of them out.')
    reason = 'prompts="traced"' if prompts == "traced" else reason
    if reason is not None and warm == "background":
        raise ConfigError(f'warm="background" contradicts {reason}, whose prompts are graphs: leave one out.')
    return reason is None


class Dispatcher:
    """What a module calls in place of its compiled forward.

    Args:
        module: The module; it holds this.
        compiled: Its compiled forward.
        config: The options of its graphs.
        is_auto: Trace prompts all the same on a GPU, and once a step shows that the model's graphs are left alone, or
            have other layers than its cache: they had the 16-bit pairs back at each first step.
        warm: See `specache_fx.compile`.
    """

    def __init__(
        self,
        module: nn.Module,
        compiled: Callable[..., Any],
        config: SpecacheConfig,
        *,
        is_auto: bool,
        warm: Warm,
    ) -> None:
        self._module, self.compiled = module, compiled
        self._config, self._is_auto = config, is_auto
        self._names = tuple(inspect.signature(module.forward).parameters)
        self._traces = "past_key_values" not in self._names
        self._has_stepped = False  # with a cache that this has filled
        self._direct = DirectSteps(module, specache.compile_step, config)
        self._background = Background(strict=config.strict) if warm == "background" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self._traces or torch.compiler.is_dynamo_compiling():
            return self.compiled(*args, **kwargs)
        call = Call(self._names, args, kwargs, getattr(self._module, "config", None))
        is_traced = self._is_auto and call.device != "cpu"  # a prompt
        if (growing := GrowingCall.of(call, is_traced=is_traced)) is not None:
            return growing.finish(self(**growing.given))
        if call.cache is not None and any(call.cache is each for each in here.filling):
            return self._module._call_impl(*args, **kwargs)  # for a module around this one
        if call.is_step:
            return self._step(call)
        return self.compiled(*args, **kwargs) if is_traced or not call.is_served else self._run_untraced(call)

    def _run_untraced(self, call: Call) -> Any:
        """Run the module as it is, and have the session take the new tokens."""
        module, past = self._module, call.take_past(self._config)
        if past is None:
            return self.compiled(*call.args, **call.kwargs)
        with having(filling=(*here.filling, call.cache)), beside():
            filled = Filling(self._config, module, call, *past)
            return filled.run(lambda: module._call_impl(*call.args, **call.kwargs))

    def _step(self, call: Call) -> Any:
        """Decode one token of each row."""
        is_moved = call.handle_dtype is None and grows(call.cache)
        if is_moved and (past := call.take_past(self._config)):
            # Copies have another layout. A session's own handles need no graph of their own.
            put_handles(call.cache, past[1])
        return self._run_untraced(call) if self._waits_for_graph(call) else self._decode(call)

    def _waits_for_graph(self, call: Call) -> bool:
        """Whether a step's graph is made in the background, or waits for another one there."""
        if self._background is None:
            return False

        def prepare() -> Callable[[], None] | None:
            session, is_traced = call.session, self._is_auto and call.device != "cpu"  # as its prompt was
            if session is None or is_traced or not fits(call, self._module):
                return None
            return partial(Rehearsal(call, session).run, self._rehearse)

        return not self._background.is_ready(call.kind, prepare)

    def _rehearse(self, call: Call) -> bool:
        """Run a step in the background; whether Dynamo traces it."""
        before = here.num_traces
        self._decode(call)
        return here.num_traces > before

    def _decode(self, call: Call) -> Any:
        """Run a step's graph."""
        filled = None if self._has_stepped else call.session
        # Batches of any size, padded or not, and beams share two graphs: with a mask, and without.
        with having(mark=call.mark_sizes):
            step = self._direct.runner_of(call)
            out = self.compiled(*call.args, **call.kwargs) if step is None else step()
        self._look(call, filled)
        return out

    def _look(self, call: Call, filled: Session | None) -> None:
        """See what graphs the model's steps have; `filled` is the session before the first."""
        has_handles = call.first_handle is not None
        traces = not has_handles and not call.asks_for_more
        if has_handles and filled is not None and filled.origin.layers_of_cache:
            self._has_stepped, now = True, call.session
            traces = self._is_auto and (now is None or now.shapes != filled.shapes)
        if traces:  # another thread may set it, too
            self._traces = True
