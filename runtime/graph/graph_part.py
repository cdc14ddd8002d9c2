"""`Part`: what is computed apart from a graph, from some of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Part of a graph that is run by itself.

    Attributes:
        graph: Computes the results, a tuple: a graph module, or what it is compiled to.
        inputs: Positions of its inputs among Dynamo's.
    """

    graph: Any
    inputs: tuple[int, ...]

    def __call__(self, args: Sequence[Any], *more: Any) -> tuple[Any, ...]:
        """The results in a call of Dynamo's `args`; `more` are inputs of the graph's own, the first ones."""
        return self.of(*more, *(args[i] for i in self.inputs))

    def of(self, *values: Any) -> tuple[Any, ...]:
        """The results of the inputs."""
        # Not a call of the module, which prints its code where it raises.
        results: tuple[Any, ...] = getattr(self.graph, "forward", self.graph)(*values)
        return results
