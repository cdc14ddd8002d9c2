"""`Pass`: a named rewrite of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from specache_fx.capture.program import Program


@dataclass(frozen=True)
class Pass:
    """A named rewrite: valid graph in, valid graph out. It edits the graph that it gets, and decides nothing.

    Attributes:
        name: As in logs, in `explain` and in `skip_passes`.
        run: `(graph module, program) -> graph module`.
        optional: It changes no answer, so `skip_passes` may name it.
    """

    name: str
    run: Callable[[GraphModule, Program], GraphModule]
    optional: bool = False
