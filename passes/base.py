"""`Pass`: a named rewrite of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from specache_fx.capture.graph.graph_edit import finish
from specache_fx.capture.graph.graph_slices import eliminate_dead_code
from specache_fx.capture.program import Program


@dataclass(frozen=True)
class Pass:
    """A named rewrite: valid graph in, valid graph out. It decides nothing. A decorator of the function that rewrites.

    Attributes:
        run: Edits a graph module that it gets with its program, or returns another one.
        optional: It changes no answer, so `skip_passes` may name it.
    """

    run: Callable[[GraphModule, Program], GraphModule | None]
    optional: bool = False

    def __call__(self, gm: GraphModule, program: Program) -> GraphModule:
        """Rewrite a graph, and take out of it what nothing needs any more."""
        made = self.run(gm, program)
        gm = gm if made is None else made
        eliminate_dead_code(gm.graph)
        return finish(gm)

    @property
    def name(self) -> str:
        """As in logs, in `explain` and in `skip_passes`."""
        return str(getattr(self.run, "func", self.run).__name__)  # below a `partial`
