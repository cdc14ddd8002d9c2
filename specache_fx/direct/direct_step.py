"""Decode steps that run without Dynamo, by graphs of `direct_trace.py` that `model_state.py` guards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

from specache_fx.calls.call import Call, loosely
from specache_fx.calls.this_thread import tracing
from specache_fx.capture.graph.recorder import NotDirect
from specache_fx.config import SpecacheConfig
from specache_fx.direct import inductor_start
from specache_fx.direct.direct_trace import Traced, trace_step
from specache_fx.direct.model_state import ModelState, reason_against
from specache_fx.direct.model_twin import named_tensors
from specache_fx.direct.traced_values import values_of
from specache_fx.resets import on_reset
from specache_fx.runners.base import compiling
from specache_fx.runtime.handles.handle_tensor import bare

logger = logging.getLogger(__name__)
_MOST_TRACES = 4
"""Graphs for one kind of call whose state or sizes change. Dynamo makes symbols of them then."""


class DirectStep:
    """One graph of a step.

    Args:
        module: The model.
        traced: Its step.
        run: The graph's runner.
    """

    def __init__(self, module: nn.Module, traced: Traced, run: Callable[..., Any]) -> None:
        self._run, self._output, self._validity = run, traced.output, traced.validity
        weights = dict(named_tensors(module))
        # The model's state says that these are still its weights.
        self._args = [weights[each.name] if each.kind == "weight" else None for each in traced.inputs]
        self._varying = [(i, each) for i, each in enumerate(traced.inputs) if each.kind != "weight"]

    def of(self, call: Call) -> Callable[[], Any] | None:
        """What runs a call, and updates its cache; None where the graph is not for its sizes."""
        sizes = self._validity.values(call.given, call.cache.layers)
        return None if sizes is None else partial(self._call, call.given, call.cache, sizes)

    def _call(self, given: Mapping[str, Any], cache: Any, sizes: Mapping[str, int]) -> Any:
        args: list[Any] = [*self._args]
        for i, each in self._varying:
            args[i] = sizes[each.name] if each.kind == "size" else each.read(given, cache.layers)
        with bare():
            results = self._run(*args)
        return self._output.put(results, cache)


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
        self._refused: set[Hashable] = set()
        self._changes = 0  # of the state

    def runner_of(self, call: Call) -> Callable[[], Any] | None:
        """What runs a call: traced, where it is new. None where Dynamo has to trace it."""
        form, stance = call.form, eval_frame._stance.stance
        if form is None or form in self._refused or stance not in ("default", "fail_on_recompile"):
            return None
        if (state := self._state) is not None and not state.is_same():
            with compiling():
                if self._state is state:  # another thread may have seen it, too
                    self._steps.clear()
                    self._state, self._changes = None, self._changes + 1
        with bare():
            run = self._known(form, call)
            if run is not None or stance != "default":  # Dynamo says that it would compile
                return run
            with compiling():
                try:
                    run = self._known(form, call)  # another thread may have made it
                    return self._make(call, form) if run is None else run
                except NotDirect as no:
                    self._refused.add(form)
                    logger.info(
                        "specache: Dynamo traces this step of %s: %s.", type(self._module).__name__, no
                    )
                    return None

    def _known(self, form: Hashable, call: Call) -> Callable[[], Any] | None:
        """What runs a call by a graph that there is."""
        return next(filter(None, (step.of(call) for step in self._steps.get(form, ()))), None)

    def _make(self, call: Call, form: Hashable) -> Callable[[], Any]:
        """Make a call's graph.

        Raises:
            NotDirect: If Dynamo has to trace it.
        """
        module = self._module
        if (reason := reason_against(module)) is not None:
            raise NotDirect(reason)
        same_inputs = [
            step for other in self._steps if loosely(other) == loosely(form) for step in self._steps[other]
        ]
        if max(self._changes, len(same_inputs)) >= _MOST_TRACES:
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
        step = DirectStep(module, traced, runner)
        if (run := step.of(call)) is None:
            raise NotDirect("its layers have sizes that no symbols tell")
        self._state = state
        counters["specache"]["direct_steps"] += 1
        self._steps.setdefault(form, []).append(step)
        return run
