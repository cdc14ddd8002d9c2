"""The record of where keys and values come from; `by_indices.py` fills it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.fx import Node

from specache_fx.capture.graph.graph_utils import shape_of
from specache_fx.runtime.handles.handle_form import token_dim


class Tokens(Enum):
    """The number of tokens that a buffer holds before a call, by its way of writing."""

    ANY = "any"
    NONE = "none"
    SOME = "some"  # `Written.position` of them
    FULL = "as many as it has room for"


@dataclass(frozen=True)
class Written:
    """What keys or values of an attention are made of: a cache that grows, or a buffer that is written in place.

    Attributes:
        tensor: The cache with all of its tokens, or all that is in a buffer after this call.
        form: Its form.
        side: Of a pair: 0 for keys, 1 for values.
        num_kv_heads: Its heads.
        is_tiled: Heads are repeated one after the other, as `repeat` does, and not each by itself.
        new: This call's tokens.
        new_form: The form of `new`, which may hold both sides of a pair.
        buffer: The input that tokens are appended to, or written into; or what this call makes for them. None where
            no tokens were there before.
        position: Of a buffer: where the first token is written, or where each is: a number, or a node. It tells
            nothing with `Tokens.NONE` and `FULL`.
        end: Where the rows end that are read; None where all are, or this call's tokens alone.
        reads_new: The operand is this call's tokens, and not read from the buffer.
        window: Tokens that the buffer has room for, where it keeps the newest; None where it keeps all.
        before: Tokens that it has to hold before this call.
    """

    tensor: Node
    form: str
    side: int
    num_kv_heads: int
    is_tiled: bool
    new: Node
    new_form: str
    buffer: Node | None = None
    position: Any = None
    end: Any = None
    reads_new: bool = False
    window: int | None = None
    before: Tokens = Tokens.ANY

    @property
    def is_input(self) -> bool:
        """Whether the buffer is there before this call."""
        return self.buffer is not None and self.buffer.op == "placeholder"

    @property
    def capacity(self) -> Any:
        """Tokens that the buffer has room for."""
        return (shape_of(self.tensor) or ())[token_dim(self.form)]

    @property
    def q_len(self) -> Any:
        """The number of tokens that are written."""
        return (shape_of(self.new) or ())[token_dim(self.new_form)]


def with_nodes(record: Any, change: Callable[[Any], Any]) -> Any:
    """A record, or several, with other nodes in it: `change` takes each of its values."""
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record)]
        return type(record)(*(with_nodes(getattr(record, name), change) for name in names))  # type: ignore[misc]
    if isinstance(record, list):
        return [with_nodes(each, change) for each in record]
    return change(record)
