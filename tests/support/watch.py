"""Operators as they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Calls `note(operator, args, kwargs)` before each operator in its block."""

    def __init__(self, note: Callable[..., object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
