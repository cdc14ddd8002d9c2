"""Tensor subclasses (torchao's quantised weights) as the plain tensors that they wrap.

`make_fx` takes a subclass among its inputs for a constant of the trace. So graphs get the tensors inside. While a graph
is traced each subclass is put together again where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def flatten(values: Sequence[Any]) -> list[Any]:
    """`values`, each subclass replaced by the plain tensors in it."""
    flat: list[Any] = []
    for value in values:
        inner = type(value) not in _PLAIN and is_traceable_wrapper_subclass(value)
        flat.extend(
            flatten([getattr(value, name) for name in value.__tensor_flatten__()[0]]) if inner else [value]
        )
    return flat


def unflatten(values: Sequence[Any], plain: Sequence[Any]) -> list[Any]:
    """`values` again, made of what `flatten` gave, or of traces of that.

    Args:
        values: As given to `flatten`: says which are subclasses, and what they hold besides tensors.
        plain: One for each that `flatten(values)` gave.
    """
    rest = iter(plain)
    return [_rebuild(value, rest) for value in values]


def _rebuild(value: Any, rest: Iterator[Any]) -> Any:
    if not is_traceable_wrapper_subclass(value):
        return next(rest)
    names, context = value.__tensor_flatten__()
    inner = {name: _rebuild(getattr(value, name), rest) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
