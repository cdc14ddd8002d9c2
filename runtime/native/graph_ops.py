"""Operators of decode graphs that are C++ on the CPU: `specache::products` and `specache::layer_step`.

Products: every weight is read once, by all threads of PyTorch. Sums are of float32, in an order of their own: they
differ from BLAS's by rounding.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

from specache_fx.runtime.cpp_build import BuildError, load_library, usable_instruction_sets

_i64, _address = ctypes.c_int64, ctypes.c_void_p
_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent


class LayerC(ctypes.Structure):
    """`SpecacheLayer` of graph_ops.cpp."""

    _fields_ = (
        ("has_run", _i64),
        *(
            (name, _i64)
            for name in ("lanes", "batch", "num_heads", "num_kv_heads", "key_dim", "value_dim", "dtype")
        ),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, _address) for name in ("query", "key", "value", "sinks", "out")),
        *((name, _address) for name in ("step", "inputs", "rest", "stage", "wanted_rows")),
        ("failed", _i64),
    )


class LayersC(ctypes.Structure):
    """`SpecacheLayers` of graph_ops.cpp."""

    _fields_ = (("state", _i64), ("num_layers", _i64), ("layers", _address))


class PythonC(ctypes.Structure):
    """`SpecachePython` of graph_ops.cpp."""

    _fields_ = tuple(
        (name, _address)
        for name in (
            *("ensure", "release", "call", "fetch", "normalize", "set_traceback", "drop"),
            "operators",
        )
    )


_FUNCTIONS = (
    *("PyGILState_Ensure", "PyGILState_Release", "PyObject_CallNoArgs"),
    *("PyErr_Fetch", "PyErr_NormalizeException", "PyException_SetTraceback", "Py_DecRef"),
)
_python = PythonC(*(ctypes.cast(getattr(ctypes.pythonapi, name), _address).value for name in _FUNCTIONS))
_called: list[Callable[[], None]] = []  # what C++ has the address of


def run_layers_by(operators: Callable[[], None]) -> None:
    """Have C++ call `operators` for a layer that it doesn't do: between `layer_arguments` and `layer_result`."""
    _called[:] = [operators]
    _python.operators = id(operators)


def take_failure() -> BaseException | None:
    """What `operators` failed with in this thread, once."""
    if not load.cache_info().currsize or (loaded := load()) is None:
        return None
    address = loaded.specache_take_failure()
    if address is None:
        return None
    failure = ctypes.cast(address, ctypes.py_object)
    error: BaseException = failure.value
    ctypes.pythonapi.Py_DecRef(failure)  # what was C++'s own
    return error


@functools.cache
def load() -> ctypes.CDLL | None:
    """Have them run in C++ from now on, built at first use; None where it can't be."""
    try:
        loaded = load_library("graph_ops", SOURCES, usable_instruction_sets()[0], with_torch=True)
    except BuildError as error:
        _log.info("decode graphs without operators in C++: %s", error)
        return None
    loaded.specache_layer_size.restype = ctypes.c_int64
    assert loaded.specache_layer_size() == ctypes.sizeof(LayerC)
    loaded.specache_get_ready.argtypes = (ctypes.c_void_p,)
    loaded.specache_get_ready.restype = None
    loaded.specache_take_failure.restype = ctypes.c_void_p
    loaded.specache_use_python.argtypes = (ctypes.c_void_p,)
    loaded.specache_use_python.restype = None
    loaded.specache_use_python(ctypes.addressof(_python))
    return loaded
