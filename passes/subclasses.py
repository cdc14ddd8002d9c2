"""Tensor subclasses (torchao's quantised weights) as the plain tensors that they wrap.

`make_fx` takes a subclass among its inputs for a constant of the trace. So the decode graph gets what is inside, and
each subclass is put together again where the graph begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def flatten(values: Sequence[Any]) -> list[torch.Tensor]:
    """The plain tensors of all tensors among `values`, in order; what is no tensor is left out."""
    flat: list[torch.Tensor] = []
    for value in values:
        if type(value) in _PLAIN:
            flat.append(value)
        elif isinstance(value, torch.Tensor):
            flat.extend(_plain(value))
    return flat


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def unflatten(values: Sequence[Any], plain: Sequence[torch.Tensor]) -> list[Any]:
    """`values` again, their tensors replaced by others that `flatten` gave, or traces of these.

    Args:
        values: As given to `flatten`: says which are subclasses, and what they hold besides tensors.
        plain: One per tensor that `flatten(values)` gave.
    """
    rest = iter(plain)
    return [_rebuild(value, rest) if isinstance(value, torch.Tensor) else value for value in values]


def _rebuild(tensor: Any, rest: Iterator[torch.Tensor]) -> torch.Tensor:
    if not is_traceable_wrapper_subclass(tensor):
        return next(rest)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _rebuild(getattr(tensor, name), rest) for name in names}
    rebuilt: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return rebuilt
