"""The public functions: `compile`, `stats` and `release`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from specache_fx.backend import Backend, check_names
from specache_fx.calls.dispatcher import Dispatcher, Prompts, Warm, runs_untraced
from specache_fx.compiled import backend_of, with_generators
from specache_fx.config import SpecacheConfig
from specache_fx.errors import CacheHandleError, ConfigError
from specache_fx.report.session_stats import SessionStats, summarise
from specache_fx.runtime.handles.handle_form import MOST_DIMS
from specache_fx.runtime.host.host_blocks import check_host_dir
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.session import Session

NO_CACHE = (
    "The argument of {function}() has no KV cache of specache in it. Give it the past_key_values of a compiled model,"
    " such as model.generate(..., return_dict_in_generate=True).past_key_values. If this is one, it has one of three"
    " causes. generate() of the wrapper torch.compile(model) runs uncompiled: use specache_fx.compile() or"
    " model.compile(). The model's attention was left alone, as it is with gradients enabled: specache_fx.explain()"
    " says why. Another process made the cache."
)
Module = TypeVar("Module", bound=nn.Module)


def compile(module: Module, *, prompts: Prompts = "auto", warm: Warm = "block", **options: Any) -> Module:
    """Compile a model with this backend so that its `generate()` uses it.

    It compiles a module, and each module inside that has a `generate()` of its own: that of a wrapper (a PEFT model)
    calls the one inside. `torch.compile(module)` returns a wrapper whose `generate()` belongs to the module inside and
    so runs uncompiled; given such a wrapper, this compiles the module inside, and those in it, as the wrapper is.

    A prompt needs no graph to be right. With `prompts="traced"` this is the same as
    `module.compile(backend="specache", options=options)`.

    Args:
        module: A model, or the wrapper of `torch.compile(model, backend="specache")`.
        prompts: "untraced": prompts and further turns run as the model is, and start at once. The decode step alone is
            traced; one of a transformers model without Dynamo. This serves transformers' `DynamicCache`, and a
            `StaticCache` that is new; other calls are traced. "traced": they are graphs of Dynamo's, one for each kind
            of them. "auto" (the default): "untraced" on a CPU, as far as the decode step has the layers of the cache;
            "traced" elsewhere, with `policy="kivi"` and with `compile_prefill`.
        warm: What a decode step does whose graph is not made yet. "block" (the default): it waits. "background": a
            thread makes the graph, by steps of `module` on a small cache. Tokens come from the uncompiled model until
            then. This serves a `DynamicCache` whose prompt ran untraced; other steps wait.
        **options: See `SpecacheConfig`. A wrapper already has its own.

    Returns:
        `module` itself.

    Raises:
        ConfigError: On unknown or bad options, a `host_dir` that can't be used, options for a wrapper, a wrapper of
            another backend, an object that is no module, or `prompts="untraced"` or `warm="background"` where prompts
            have to be graphs.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"specache_fx.compile() got {module!r}: give it a model (a torch.nn.Module). A function that runs one is"
            ' compiled with torch.compile(function, backend="specache").'
        )
    if "options" in options:
        raise ConfigError(
            "specache_fx.compile() takes options by their names: specache_fx.compile(model, bits=2), not options={...}."
        )
    if isinstance(module, OptimizedModule):
        ways = {"prompts": (prompts, "auto"), "warm": (warm, "block")}
        _compile_inside(
            module, {**options, **{name: way for name, (way, usual) in ways.items() if way != usual}}
        )
        return module
    config = SpecacheConfig.from_options(options)
    check_names(config)
    if config.placement.offload:
        check_host_dir(config.host, config.host_dir)
    is_untraced = runs_untraced(prompts, warm, config)
    for each in with_generators(module):
        each.compile(backend="specache", options=options)
        if is_untraced:
            each._compiled_call_impl = Dispatcher(
                each, each._compiled_call_impl, config, is_auto=prompts == "auto", warm=warm
            )
    return module


def _compile_inside(module: OptimizedModule, options: Mapping[str, Any]) -> None:
    """Compile the modules inside the wrapper of `torch.compile` as the wrapper is."""
    if options:
        raise ConfigError(
            f"{', '.join(options)}: this module is compiled already, with options of its own. Give them to"
            " torch.compile(..., options={...}), or give specache_fx.compile() the module that is not compiled."
        )
    backend, _ = backend_of(module.dynamo_ctx)
    if not isinstance(backend, Backend):
        name = getattr(backend, "_compiler_name", backend)
        raise ConfigError(
            f'This module was compiled with backend {name!r}, not with "specache". Give specache_fx.compile() the'
            " module that is not compiled."
        )
    for inner in with_generators(module._orig_mod):
        inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)


def stats(past_key_values: Any) -> SessionStats:
    """Count a KV cache's bytes and steps, and the hit rates of its guesses.

    Args:
        past_key_values: A cache that a compiled model returned: a transformers `Cache`, or any nest of tuples,
            lists, dicts and dataclasses with its tensors. One generation's sessions (several after graph breaks) are
            added up.

    Returns:
        Sizes and counts; a snapshot.

    Raises:
        CacheHandleError: If there is no tensor of this backend in it.
    """
    sessions = _sessions(past_key_values, "stats")
    if any(session.closed for session in sessions):
        raise CacheHandleError(
            "The KV cache that stats() was given was released: nothing of it is left to count."
        )
    return summarise(sessions)


def release(past_key_values: Any) -> None:
    """Free a KV cache's memory on the device and on the host, now.

    A cache is freed by itself as soon as the last of its tensors, and of their copies and views, is dropped: `del out`
    is enough where nothing else holds them. The call that compiles a model's first decode step leaves a reference cycle
    of Dynamo's around its cache, which goes with `gc.collect()`. This is for caches that something still holds.

    Whoever uses a released cache, or a copy of it, gets a `CacheHandleError`, and so does `stats()`.
    Releasing a cache twice does nothing. Releasing a copy does nothing while the original is held. A copy that a model
    has gone on from is a cache of its own. A step that another thread runs is waited for.

    Args:
        past_key_values: As for `stats`.

    Raises:
        CacheHandleError: If there is no tensor of this backend in it.
    """
    for session in _sessions(past_key_values, "release"):
        registry.release(session, list(_tensors(past_key_values)))


def _sessions(past_key_values: Any, function: str) -> list[Session]:
    """The sessions that the tensors of a cache belong to."""
    sessions: dict[int, Session] = {}
    for tensor in _tensors(past_key_values):
        if (session := registry.find(tensor)) is not None:
            sessions[session.number] = session
    if not sessions:
        raise CacheHandleError(NO_CACHE.format(function=function))
    return list(sessions.values())


def _tensors(tree: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors of a cache: of containers all items, of other objects (a `Cache` and its layers) all attributes."""
    if isinstance(tree, torch.Tensor):
        if 3 <= tree.dim() <= MOST_DIMS:
            yield tree
    elif isinstance(tree, (list, tuple, deque, Mapping)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(item, depth)
    elif (
        depth
        and hasattr(tree, "__dict__")
        and not isinstance(tree, (str, bytes, int, float, type, nn.Module))
    ):
        yield from _tensors(list(vars(tree).values()), depth - 1)
