"""The sessions that there are, whoever holds them."""

from __future__ import annotations

import gc
from typing import Any

from specache_fx.runtime import registry
from specache_fx.runtime.session import Session


def session_of(past: Any) -> Session:
    """The session of a cache of transformers, or of pairs of keys and values."""
    session = registry.find(past.layers[0].keys if hasattr(past, "layers") else past[0][0])
    assert session is not None
    return session


def num_sessions() -> int:
    """Sessions of this process that are not closed. A call that compiles leaves cycles, which hold its cache."""
    gc.collect()
    return sum(type(each) is Session and not each.closed for each in gc.get_objects())
