"""`NextAnswer`: the next call's outputs, computed already (`SpecacheConfig.accept_guesses`).

Lane 1 decodes a guess at the next token, in its place and behind lane 0's pair. If the guess is right, the next call
returns lane 1's outputs and runs no graph. Lane 1's pairs lie behind the windows' last ones by then, and are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LaneCall:
    """Inputs of one lane's outputs.

    Attributes:
        graph: Whose inputs these are.
        computed: The token, the prelude of its position, and masks of windows: compared by their numbers.
        given: All other tensors, most of them weights: the same ones, where they were, in the same version.
        numbers: Inputs that are no tensors, and the form of the masks.
    """

    graph: object
    computed: Sequence[Tensor]
    given: Sequence[Tensor]
    numbers: Sequence[Any]


class NextAnswer:
    """Outputs of lane 1. They keep no weight alive.

    Args:
        results: One per result of the graph.
        call: Their inputs; none is an inference tensor, whose changes don't show.

    Attributes:
        results: See above.
    """

    def __init__(self, results: list[Any], call: LaneCall) -> None:
        self.results = results
        self._graph = weakref.ref(call.graph)
        self._computed, self._numbers = call.computed, list(call.numbers)
        self._given = [(weakref.ref(tensor), *_mark(tensor)) for tensor in call.given]

    def answers(self, call: LaneCall) -> bool:
        """Whether a call would compute the same, within rounding: it has the same inputs."""
        return (
            self._graph() is call.graph
            and self._numbers == list(call.numbers)
            and len(self._given) == len(call.given)
            and all(
                known() is tensor and tuple(mark) == _mark(tensor)
                for (known, *mark), tensor in zip(self._given, call.given, strict=True)
            )
            and len(self._computed) == len(call.computed)
            and all(map(torch.equal, self._computed, call.computed))
        )


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version
