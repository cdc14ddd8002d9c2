"""The caller's duties towards buffers of fixed length: found in the graph, done in each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from specache_fx.capture.by_indices import Tokens

Size = int | tuple[int, int | None]
"""A number; or the input of Dynamo's that has it as a size, and in which dimension (None: the input is the number)."""


def size_in(told: Size, args: Sequence[Any]) -> int:
    """The value of a size in a call."""
    if isinstance(told, int):
        return told
    place, dim = told
    return int(args[place] if dim is None else args[place].shape[dim])


@dataclass(frozen=True)
class Buffer:
    """Keys or values of a layer, as the model keeps them.

    Attributes:
        place: Position among Dynamo's inputs; None where the graph makes the buffer, in a first call.
        input: Position among the graph's: the values of a pair have one behind Dynamo's.
        outputs: Positions among Dynamo's outputs where the buffer itself is returned.
        form: See `runtime/handle_form.py`.
        num_kv_heads: KV heads.
        capacity: Tokens that it has room for; see `Size`.
        window: Tokens that it has room for, where it keeps the newest; None where it keeps all.
        before: Tokens that it has to hold before the call.
    """

    place: int | None
    input: int | None
    outputs: tuple[int, ...]
    form: str
    num_kv_heads: int
    capacity: Size
    window: int | None
    before: Tokens

    def held(self, count: int) -> int:
        """Tokens of `count` that the session keeps of it: no query reaches the oldest one of a full window."""
        return count if self.window is None else min(count, self.window - 1)


@dataclass(frozen=True)
class FixedCaches:
    """The caller's duties towards a graph's buffers.

    Attributes:
        buffers: Keys and values in turn, layer by layer.
        starts: Positions of inputs that say where the first of this call's tokens is written: 0-d counters.
        positions: Computes, from Dynamo's inputs `position_inputs`, where else tokens are written (`[q_len]`, or a
            number: where the first one is), how many tokens an attention reads, and what the model asserts of that.
        position_inputs: See `positions`.
        ends: Of these results the numbers of tokens that are read: whether each has to be the number that is there, for
            no mask hides more.
        asserts: What to say where an assertion doesn't hold, the last of these results.
        counters: Positions of integer inputs that the model moves.
        counted: Computes their next values from Dynamo's inputs `counted_inputs`.
        counted_inputs: See `counted`.
        masks: Positions of inputs that are masks over the whole buffer, and are to be cut to the tokens that are there.
        shown: Whether each mask shows rows behind the tokens that are there: from their number (int64 `[]`), and
            Dynamo's inputs `shown_inputs`.
        shown_inputs: See `shown`.
        q_len: How many tokens the call has.
        batch: Number of sequences; a buffer may have room for more.
    """

    buffers: tuple[Buffer, ...]
    starts: tuple[int, ...]
    positions: GraphModule
    position_inputs: tuple[int, ...]
    ends: tuple[bool, ...]
    asserts: tuple[str, ...]
    counters: tuple[int, ...]
    counted: GraphModule
    counted_inputs: tuple[int, ...]
    masks: tuple[int, ...]
    shown: Callable[..., Any]
    shown_inputs: tuple[int, ...]
    q_len: Size
    batch: Size
