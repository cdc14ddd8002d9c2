"""Copies of a model's modules that hold other tensors, to trace its `forward` while another thread runs the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_DICTS = (dict, OrderedDict)
_CONTAINERS = (*_DICTS, list, set)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of all parameters and buffers, of one that has two names both."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def twins_of(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[nn.Module]:
    """A model's modules anew, itself first. All else that they hold is the model's own.

    Args:
        module: The model.
        tensors: By name, in place of its parameters and buffers.
    """
    by_id = {id(tensor): tensors[name] for name, tensor in named_tensors(module) if name in tensors}
    twins: dict[int, nn.Module] = {id(each): object.__new__(type(each)) for each in module.modules()}

    def inner(value: Any) -> Any:
        """What a twin has in a value's place."""
        if isinstance(value, nn.Module):
            return twins.get(id(value), value)
        return by_id.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def copied(value: Any) -> Any:
        if type(value) in _DICTS:
            return type(value)((key, inner(item)) for key, item in value.items())
        return value.copy() if type(value) in _CONTAINERS else inner(value)

    for each in module.modules():
        vars(twins[id(each)]).update({name: copied(value) for name, value in vars(each).items()})
        vars(twins[id(each)])["_compiled_call_impl"] = None  # of a model in it, too
    return list(twins.values())
