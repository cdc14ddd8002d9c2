"""Decode steps that run without Dynamo, by graphs of `direct_trace.py` that `model_state.py` guards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils._sympy.printers import PythonPrinter

from specache_fx import inductor_start
from specache_fx.call import Call
from specache_fx.capture.recorder import NotDirect
from specache_fx.config import SpecacheConfig
from specache_fx.direct_trace import CACHE, Input, Result, Traced, trace_step
from specache_fx.known_caches import form_of, grows, has_own_methods
from specache_fx.model_state import ModelState, reason_against
from specache_fx.model_twin import named_tensors
from specache_fx.resets import on_reset
from specache_fx.runners import compiling
from specache_fx.runtime.handle_form import is_laid_out
from specache_fx.runtime.handle_tensor import bare
from specache_fx.this_thread import tracing
from specache_fx.traced_values import values_of

logger = logging.getLogger(__name__)
_MOST_TRACES = 4
"""Graphs for one kind of call whose state or sizes change. Dynamo makes symbols of them then."""


def _as_function(guard: Any, symbols: Sequence[str]) -> Callable[..., bool]:
    """A guard as a function of the symbols' values, as `ShapeEnv` evaluates guards."""
    code = f"lambda {', '.join(symbols)}: {PythonPrinter().doprint(guard)}"
    function: Callable[..., bool] = eval(code, dict(SYMPY_INTERP))
    return function


def _size_at(where: Input, dim: int, given: Mapping[str, Any], layers: Sequence[Any]) -> int:
    if where.kind == "argument":
        return int(given[where.name].shape[dim])
    layer = layers[where.layer]
    if where.kind == "state":
        return int(getattr(layer, where.name)[where.key].shape[dim])
    return int(layer.cumulative_length if where.kind == "count" else getattr(layer, where.kind).shape[dim])


class DirectStep:
    """One graph of a step.

    Args:
        module: The model.
        traced: Its step.
        run: The graph's runner.
    """

    def __init__(self, module: nn.Module, traced: Traced, run: Callable[..., Any]) -> None:
        self._run, self._inputs = run, traced.inputs
        self._leaves, self._tree = traced.leaves, traced.tree
        weights = dict(named_tensors(module))
        # The model's state says that these are still its weights.
        self._args = [weights[each.name] if each.kind == "weight" else None for each in self._inputs]
        self._varying = [(i, each) for i, each in enumerate(self._inputs) if each.kind != "weight"]
        self._counts, self._constants = traced.counts, traced.constants
        self._pairs = list(dict.fromkeys(each.layer for each in self._inputs if each.kind == "keys"))
        self._num_tensors = sum(isinstance(leaf, Result) for leaf in self._leaves)
        self._sizes = {str(symbol): places for symbol, places in traced.sizes.items()}
        self._guards = [_as_function(guard, list(self._sizes)) for guard in traced.guards]

    def sizes(self, given: Mapping[str, Any], cache: Any) -> dict[str, int] | None:
        """The values of the graph's symbols in a call; None where the graph does not hold for them."""
        layers, sizes = cache.layers, {}
        if any(_size_at(where, dim, given, layers) != size for where, dim, size in self._constants):
            return None
        for symbol, places in self._sizes.items():
            found = [_size_at(where, dim, given, layers) for where, dim in places]
            if min(found) < 2 or min(found) != max(found):
                return None
            sizes[symbol] = found[0]
        return sizes if all(guard(*sizes.values()) for guard in self._guards) else None

    def __call__(self, given: Mapping[str, Any], cache: Any, sizes: Mapping[str, int]) -> Any:
        """Run a call, and update its cache."""
        args: list[Any] = [*self._args]
        layers = cache.layers
        for i, (kind, name, layer, key) in self._varying:
            if kind == "argument":
                args[i] = given[name]
            elif kind == "state":
                args[i] = getattr(layers[layer], name)[key]
            elif kind == "size":
                args[i] = sizes[name]
            elif kind == "count":
                args[i] = layers[layer].cumulative_length
            else:
                args[i] = getattr(layers[layer], kind)
        with bare():
            results = self._run(*args)
        pairs = iter(results[self._num_tensors :])
        for i in self._pairs:
            layer = layers[i]
            layer.keys, layer.values = next(pairs), next(pairs)
        for i in self._counts:
            layers[i].cumulative_length += 1
        leaves = [
            results[leaf] if isinstance(leaf, Result) else cache if leaf is CACHE else leaf
            for leaf in self._leaves
        ]
        return pytree.tree_unflatten(leaves, self._tree)


class DirectSteps:
    """The direct steps of a model.

    Args:
        module: The model.
        compile_step: Makes a runner of a graph, with options and the model's values: see `Backend.compile_step`.
        config: The options.
    """

    def __init__(
        self,
        module: nn.Module,
        compile_step: Callable[..., Callable[..., Any] | None],
        config: SpecacheConfig,
    ) -> None:
        self._module, self._compile_step, self._config = module, compile_step, config
        self.forget()
        on_reset(self.forget)

    def forget(self) -> None:
        """Forget all graphs."""
        self._state: ModelState | None = None
        self._steps: dict[Hashable, list[DirectStep]] = {}
        self._refused: dict[Hashable, str] = {}
        self._changes = 0  # of the state
        self._made: Counter[Hashable] = Counter()  # graphs, of each kind of call

    def runner_of(self, call: Call) -> Callable[[], Any] | None:
        """What runs a call: traced, where it is new. None where Dynamo has to trace it."""
        key, stance = key_of(call), eval_frame._stance.stance
        if key is None or key in self._refused or stance not in ("default", "fail_on_recompile"):
            return None
        if (state := self._state) is not None and not state.is_same():
            with compiling():
                if self._state is state:  # another thread may have seen it, too
                    self._steps.clear()
                    self._made.clear()
                    self._state, self._changes = None, self._changes + 1
        with bare():
            if (
                run := self._known(key, call)
            ) is not None or stance != "default":  # Dynamo says that it would compile
                return run
            with compiling():
                if (run := self._known(key, call)) is not None:  # another thread has made it
                    return run
                try:
                    self._make(call, key)
                    if (run := self._known(key, call)) is None:
                        raise NotDirect("its layers have sizes that no symbols tell")
                    return run
                except NotDirect as no:
                    self._refused[key] = str(no)
                    logger.info(
                        "specache: Dynamo traces this step of %s: %s.", type(self._module).__name__, no
                    )
                    return None

    def _known(self, key: Hashable, call: Call) -> Callable[[], Any] | None:
        """What runs a call by a graph that there is."""
        for step in self._steps.get(key, ()):
            if (sizes := step.sizes(call.given, call.cache)) is not None:
                return partial(step, call.given, call.cache, sizes)
        return None

    def _make(self, call: Call, key: Hashable) -> None:
        module = self._module
        if (reason := reason_against(module)) is not None:
            raise NotDirect(reason)
        kind = _loosely(key)
        if max(self._changes, self._made[kind]) >= _MOST_TRACES:
            raise NotDirect(f"its state, sizes or numbers have changed {_MOST_TRACES} times")
        if self._config.lowering == "inductor" and call.device == "cpu":
            inductor_start.begin()
        with tracing():
            state = self._state or ModelState(module)
            traced = trace_step(module, call.given, call.batch)
            if not state.is_same():
                raise NotDirect("its forward changes what it reads")
            runner = self._compile_step(traced.graph, self._config, values_of(module))
            if runner is None:
                raise NotDirect("not all of its attention is rewritten")
        self._state = state
        counters["specache"]["direct_steps"] += 1
        self._made[kind] += 1
        self._steps.setdefault(key, []).append(DirectStep(module, traced, runner))


def _loosely(key: Any) -> Hashable:
    """A key without its numbers, which may differ from call to call."""
    if isinstance(key, tuple):
        return tuple(map(_loosely, key))
    return None if type(key) is int else key


def key_of(call: Call) -> tuple[Hashable, ...] | None:
    """What tells one graph of a call from another, but for sizes; None of a call that has none without Dynamo."""
    if torch._C._len_torch_function_stack() or _len_torch_dispatch_stack():
        return None
    handle = call.first_handle
    if handle is None or not grows(call.cache) or has_own_methods(call.cache) or not is_laid_out(handle):
        return None
    forms: list[Hashable] = []
    for name, value in sorted(call.given.items()):
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor:
                return None
            rows = "one" if call.batch < 2 else None
            shape = [
                rows if dim == 0 and size == call.batch else size for dim, size in enumerate(value.shape)
            ]
            if name == "attention_mask":
                if value.dim() < 2 or value.shape[0] != call.batch:
                    return None
                shape[-1] = None
            forms.append((name, value.dtype, value.device, *shape))
        elif value is None or isinstance(value, (bool, int, str)):
            forms.append((name, value))
        elif value is not call.cache:
            return None
    device = call.device
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    modes = torch.is_inference_mode_enabled(), cast, torch.get_default_dtype()
    return (*forms, *modes, handle.dtype, *map(form_of, call.cache.layers))
