"""Operators in C++ on the CPU, see `csrc/graph_ops.cpp`: `specache::products`, `layer_step`, `replay` and others.

Products: every weight is read once, by all threads of PyTorch. Sums are of float32, in an order of their own: they
differ from BLAS's by rounding.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging

from specache_fx.runtime.native.cpp_build import BuildError, load_best

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
        loaded = load_best("graph_ops")
    except BuildError as error:
        _log.info("operators without C++: %s", error)
        return None
    loaded.specache_session_size.restype = loaded.specache_layer_size.restype = ctypes.c_int64
    loaded.specache_tape_new.restype = ctypes.c_void_p
    loaded.specache_tape_delete.argtypes = (ctypes.c_void_p,)
    loaded.specache_tape_delete.restype = None
    loaded.specache_tape_kernel.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int64)
    loaded.specache_tape_kernel.restype = ctypes.c_bool
    return loaded
