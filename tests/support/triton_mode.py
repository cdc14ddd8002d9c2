"""Triton for tests: compiled where there is a GPU, else interpreted on the CPU.

Triton decides whether it interprets when its functions are decorated, so its first import counts. `tests/conftest.py`
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
    "specache_fx.runtime.kernels.triton_lengths",
    "specache_fx.runtime.kernels.triton_merge",
    "specache_fx.runtime.kernels.triton_scores",
    "specache_fx.runtime.kernels.triton_decode",
    "specache_fx.runtime.quant.triton_pack",
    "specache_fx.runtime.select.triton_topk",
    "specache_fx.runtime.kernels.triton_gather",
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


load()
