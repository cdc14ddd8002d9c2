"""The sessions that there are, whoever holds them."""

from __future__ import annotations

import gc

from specache_fx.runtime.session import Session


def num_sessions() -> int:
    """Sessions of this process that are not closed. A call that compiles leaves cycles, which hold its cache."""
    gc.collect()
    return sum(type(each) is Session and not each.closed for each in gc.get_objects())
