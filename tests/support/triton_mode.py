"""Triton for tests: compiled where there is a GPU, else interpreted on the CPU.

Triton decides whether it interprets when its functions are decorated, so its first import counts. `support/profiles.py`
imports this module before any test, and the variable is gone again afterwards: other tests, and the processes that they
start, are not to interpret anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNEL_MODULES = (
    "specache_fx.runtime.kernels.triton.merge",
    "specache_fx.runtime.kernels.triton.scores",
    "specache_fx.runtime.kernels.triton.decode",
    "specache_fx.runtime.quant.triton_pack",
    "specache_fx.runtime.select.triton_topk",
    "specache_fx.runtime.kernels.triton.gather",
)
INSTALLED = importlib.util.find_spec("triton") is not None


def _why_not() -> str | None:
    if not INSTALLED:
        return "Triton is not installed (it is built for Linux alone)"
    old = TorchVersion(version("triton")) < "3.7" and TorchVersion(version("numpy")) >= "2.4"
    return "Triton 3.6's interpreter needs numpy below 2.4" if old and DEVICE.type == "cpu" else None


needs_triton = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))


def _no_compiler() -> str | None:
    """What a compilation to machine code lacks here."""
    if not INSTALLED:
        return "Triton is not installed (it is built for Linux alone)"
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None
    tools = Path(found.origin).parent / "backends/nvidia/bin"
    missing = [name for name in ("ptxas", "cuobjdump") if not (tools / name).exists()]
    return f"this Triton comes without {' and '.join(missing)}" if missing else None


needs_compiler = pytest.mark.skipif(_no_compiler() is not None, reason=str(_no_compiler()))


def load() -> None:
    """Import the kernels, for the interpreter where there is no GPU."""
    if not INSTALLED:
        return
    if DEVICE.type == "cpu":
        assert "triton" not in sys.modules, (
            "something has imported Triton, which now can't interpret any more"
        )
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        # Triton imports this itself when it first looks at an argument, and checks the variable.
        for name in (*KERNEL_MODULES, "triton.experimental.gluon"):
            importlib.import_module(name)
    finally:
        if DEVICE.type == "cpu":
            del os.environ["TRITON_INTERPRET"]

    if DEVICE.type == "cpu":
        _patch_once_a_launch()
        _sort_in_numpy()
        _leave_out_what_repeats()


def _patch_once_a_launch() -> None:
    """Have the interpreter patch Triton's language once a launch and not at each call of a device function.

    It looks through all members of the language each time: two fifths of what these tests took.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()

    def patch_once(fn: Any) -> Any:
        seen = frozenset(
            id(value) for value in fn.__globals__.values() if value is language or value is language.core
        )
        if seen in patched:
            return interpreter._LangPatchScope()
        patched.add(seen)
        return patch(fn)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_once


def _sort_in_numpy() -> None:
    """Have `tl.topk` of integers sort in numpy: interpreted, its network of comparisons is half of a step.

    The network is Triton's own and gives the same keys in the same order.
    """
    import numpy as np
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    def topk(x: Any, k: Any) -> Any:
        k = getattr(k, "value", k)
        best = np.sort(x.handle.data)[..., ::-1][..., :k].copy()
        return tl.tensor(TensorHandle(best, x.dtype), tl.block_type(x.dtype, list(best.shape)))

    tl.topk = topk


def _leave_out_what_repeats() -> None:
    """Have the interpreter look a numpy dtype up once a type; it makes a table of all of them each time.

    Nor does it do each int32 sum again in int64: a fourth of the rest, and tensors of tests are far from an overflow.
    """
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def remembered(kind: Any) -> Any:
        if (dtype := found.get(kind.name)) is None:
            dtype = found[kind.name] = find(kind)
        return dtype

    interpreter._get_np_dtype = remembered


load()
