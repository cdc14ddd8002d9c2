"""Operators in C++ on the CPU: `specache::products`, `specache::layer_step`, `specache::stage`, `specache::row_sums`.

Products: every weight is read once, by all threads of PyTorch. Sums are of float32, in an order of their own: they
differ from BLAS's by rounding.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging

from specache_fx.runtime.cpp_build import SOURCES, BuildError, load_library, usable_instruction_sets

_log = logging.getLogger(__name__)


class Failure(enum.IntEnum):
    """`Failure` of stage.h."""

    NONE = 0
    NO_MEMORY = 1
    NOT_ON_HOST = 2


@functools.cache
def load() -> ctypes.CDLL | None:
    """Have them run in C++ from now on, built at first use; None where it can't be."""
    try:
        loaded = load_library("graph_ops", SOURCES, usable_instruction_sets()[0], with_torch=True)
    except BuildError as error:
        _log.info("operators without C++: %s", error)
        return None
    loaded.specache_session_size.restype = loaded.specache_layer_size.restype = ctypes.c_int64
    return loaded
