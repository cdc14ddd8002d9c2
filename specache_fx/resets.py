"""What `torch.compiler.reset()` has this package forget."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from weakref import WeakMethod

_clears: list[Callable[[], Callable[[], object] | None]] = []


def on_reset(clear: Callable[[], object]) -> None:
    """Have a function called at each reset; a method as long as its object lives."""
    _clears.append(WeakMethod(clear) if isinstance(clear, MethodType) else lambda: clear)


def reset() -> None:
    """Forget all."""
    _clears[:] = [each for each in _clears if each() is not None]
    for each in list(_clears):
        if (clear := each()) is not None:
            clear()
