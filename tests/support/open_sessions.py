"""The session of a cache, and whether sessions end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest

from specache_fx.runtime.session import registry
from specache_fx.runtime.session.session import Session


def session_of(past: Any) -> Session:
    """The session of a cache of transformers, or of pairs of keys and values."""
    # Layers of linear attention have no keys.
    keys = (
        next(each.keys for each in past.layers if hasattr(each, "keys"))
        if hasattr(past, "layers")
        else past[0][0]
    )
    session = registry.find(keys)
    assert session is not None
    return session


@contextmanager
def all_end() -> Iterator[list[int]]:
    """Sessions that are made inside are closed or gone at the end; yields a list that gets their numbers."""
    made: WeakSet[Session] = WeakSet()
    numbers: list[int] = []
    begin = Session.__init__

    def noting(self: Session, *given: Any, **more: Any) -> None:
        begin(self, *given, **more)
        made.add(self)
        numbers.append(self.number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "__init__", noting)
        yield numbers
    if not all(session.closed for session in made):
        gc.collect()  # a call that compiles leaves cycles, which hold its cache
    assert all(session.closed for session in made)
