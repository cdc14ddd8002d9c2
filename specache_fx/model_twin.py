"""Copies of a model's modules that hold other tensors, to trace its `forward` while another thread runs the model."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from specache_fx.capture.recorder import NotDirect

_DICTS = (dict, OrderedDict)
_COPIED = (list, set)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of all parameters and buffers, of one that has two names both."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class Twin:
    """A model's modules anew. All else that they hold is the model's own.

    Args:
        module: The model.
        tensors: By name, in place of its parameters and buffers.

    Attributes:
        module: The copy.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        by_id = {id(tensor): tensors[name] for name, tensor in named_tensors(module) if name in tensors}
        twins = {id(each): object.__new__(type(each)) for each in module.modules()}

        def inner(value: Any) -> Any:
            """What the twin has in a value's place."""
            if isinstance(value, nn.Module):
                return twins.get(id(value), value)
            return by_id.get(id(value), value) if isinstance(value, torch.Tensor) else value

        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        for each in module.modules():
            now = {
                name: type(value)((key, inner(item)) for key, item in value.items())
                if type(value) in _DICTS
                else value.copy()
                if type(value) in _COPIED
                else inner(value)
                for name, value in vars(each).items()
            }
            now["_compiled_call_impl"] = None  # of a model in it, too
            twin = twins[id(each)]
            vars(twin).update(now)
            self._before.append((twin, {name: _content(value) for name, value in now.items()}))
        self.module: nn.Module = twins[id(module)]

    def check_unchanged(self) -> None:
        """Refuse a model whose `forward` notes something in its modules.

        Raises:
            NotDirect: If it has.
        """
        for twin, then in self._before:
            now = vars(twin)
            for name in {*now, *then}:
                old, new = then.get(name), _content(now.get(name))
                is_same = (
                    len(old) == len(new) and all(map(operator.is_, old, new))
                    if type(old) is tuple
                    else old is new
                )
                if not is_same:
                    raise NotDirect(f"its forward changes {name} of {type(twin).__name__}")


def _content(value: Any) -> Any:
    """What a container of a module holds."""
    if type(value) in _DICTS:
        return (*value.keys(), *value.values())
    return (*value,) if type(value) in _COPIED else value
