"""The modules that `specache_fx.compile` compiles; and models without that, for a while or from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def with_generators(module: nn.Module) -> list[Any]:
    """A module and those inside whose class has a `generate()`: they are called by that, past the module around."""
    return [each for each in module.modules() if each is module or hasattr(type(each), "generate")]


def backend_of(call: Any) -> tuple[Any, Any]:
    """The backend that a context of Dynamo's was made with, as the user gave it, and its options.

    Torch wraps it several times. Any other object is returned as it is.
    """
    for name in ("callback", "_torchdynamo_orig_backend", "_torchdynamo_orig_backend"):
        call = getattr(call, name, call)
    return getattr(call, "compiler_fn", call), getattr(call, "kwargs", {}).get("options")


def uncompile(model: nn.Module) -> None:
    """Undo `specache_fx.compile(model)` and `model.compile(...)`, and drop all graphs of Dynamo's."""
    for module in with_generators(model):
        module._compiled_call_impl = None
    torch._dynamo.reset()


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run the plain model within, whatever is compiled into it; its graphs are kept."""
    with contextlib.ExitStack() as stack:
        for module in with_generators(model):
            stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = None
        yield
