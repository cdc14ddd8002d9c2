"""`NextToken`: what a decode step has computed for the token after its own.

Lane 1 decodes a guess at the next token, in its place and behind lane 0's pair. Where that token comes, lane 1's
outputs are those of its step. The next call returns them and runs no graph (`SpecacheConfig.accept_guesses`). Lane 1's
pairs lie behind the windows' last ones already, and are counted then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specache_fx.runtime.masks import WindowMask


@dataclass(frozen=True)
class LaneInputs:
    """What a lane of a decode graph is computed from.

    Attributes:
        graph: Whose inputs these are.
        kv_len: Tokens before it.
        computed: The token, and what follows from its position; compared by their numbers.
        given: All other tensors, most of them weights; compared by where they are and their versions.
        numbers: Inputs that are no tensors.
        windows: By layer that keeps a window, what the model's masks let the lane see of it.
    """

    graph: object
    kv_len: int
    computed: Sequence[Tensor]
    given: Sequence[Tensor]
    numbers: Sequence[Any]
    windows: Mapping[int, WindowMask | None]

    def marks(self) -> list[tuple[int, int]] | None:
        """Of each tensor in `given` where it lies, and its version; None where one has none: an inference tensor."""
        if any(tensor.is_inference() for tensor in self.given):
            return None
        return [(tensor.data_ptr(), tensor._version) for tensor in self.given]


@dataclass(frozen=True)
class NextToken:
    """Outputs of lane 1, and what they were computed from.

    Attributes:
        results: One per result of the graph.
        inputs: Its tensors are kept, so that no other can come to lie where one was.
        marks: Of the inputs, when they were read.
    """

    results: list[Any]
    inputs: LaneInputs
    marks: list[tuple[int, int]]

    @classmethod
    def of(cls, results: list[Any], inputs: LaneInputs) -> NextToken | None:
        """Keep outputs; None where a change of the inputs could not be noticed."""
        marks = inputs.marks()
        return None if marks is None else cls(results, inputs, marks)

    def answers(self, call: LaneInputs) -> bool:
        """Whether a call would compute the same, to rounding: it has the same inputs."""
        mine = self.inputs
        return (
            mine.graph is call.graph
            and mine.kv_len == call.kv_len
            and all(map(_equal, mine.computed, call.computed))
            and list(mine.numbers) == list(call.numbers)
            and self.marks == call.marks()
            and mine.windows.keys() == call.windows.keys()
            and all(_alike(mask, call.windows[layer]) for layer, mask in mine.windows.items())
        )


def _equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def _alike(mine: WindowMask | None, theirs: WindowMask | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return mine.width == theirs.width and _equal(mine.seen, theirs.seen) and _equal(mine.bias, theirs.bias)
