"""From a rewritten graph to something that runs: Inductor, or the graph itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specache_fx.config import Lowering
from specache_fx.progress import say_step

Compiled = Callable[..., Any]


def example_state() -> torch.Tensor:
    """An example of the `state` input, fake where Dynamo's own example inputs are."""
    context = TracingContext.try_get()
    state = torch.zeros(1, dtype=torch.int64, device="cpu")
    return state if context is None or context.fake_mode is None else context.fake_mode.from_tensor(state)


def lower(gm: GraphModule, inputs: Sequence[Any], lowering: Lowering) -> Compiled:
    """Compile a graph of Dynamo's, in Dynamo's context (prefill, extend, graphs that are left alone).

    Args:
        gm: The graph.
        inputs: Example inputs, as Dynamo gave them.
        lowering: "inductor" or "eager".
    """
    if lowering == "eager":
        return gm.forward
    from torch._inductor.compile_fx import compile_fx  # imported late: it loads all of Inductor

    say_step("Inductor")

    compiled: Any = compile_fx(gm, list(inputs))
    return compiled


def lower_static(gm: GraphModule, inputs: Sequence[torch.Tensor], lowering: Lowering) -> Compiled:
    """Compile a traced graph of static shapes, at run time (decode).

    Args:
        gm: The graph.
        inputs: Real inputs.
        lowering: "inductor" or "eager".
    """
    if lowering == "eager":
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    say_step("Inductor")
    # A context of its own: Dynamo's belongs to the graph that this one was made from.
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        compiled: Any = compile_fx(gm, list(inputs))
    return compiled
