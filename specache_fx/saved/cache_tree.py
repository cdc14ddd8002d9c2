"""A model's cache object as JSON and back: containers, transformers' caches, tensors by reference.

No class is made that is not a cache or a cache's layer of transformers, and none of its code runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from specache_fx.errors import SavedCacheError

_PLAIN = (str, int, float, bool, type(None))


def describe(value: Any, name_of: Callable[[torch.Tensor], Any]) -> Any:
    """A cache as values that JSON has.

    Args:
        value: The cache.
        name_of: Names a tensor.

    Raises:
        SavedCacheError: If something in it can't be written down.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": name_of(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}  # where the model is then
    if type(value) in (list, tuple):
        return {type(value).__name__: [describe(item, name_of) for item in value]}
    if type(value) is dict:
        return {"dict": [[describe(key, name_of), describe(item, name_of)] for key, item in value.items()]}
    if isinstance(value, type) and _is_of_transformers(value):
        return {"class": [value.__module__, value.__qualname__]}
    if _is_of_transformers(type(value)):
        state = {key: describe(item, name_of) for key, item in vars(value).items()}
        return {"object": [type(value).__module__, type(value).__qualname__], "state": state}
    raise SavedCacheError(
        f"A {type(value).__qualname__} in this cache can't be saved. Give save() a cache of transformers, or the"
        " cache's tensors in lists, tuples and dicts."
    )


def rebuild(tree: Any, tensor_of: Callable[[Any], torch.Tensor], device: torch.device) -> Any:
    """The cache that `describe` wrote down.

    Args:
        tree: Its result.
        tensor_of: The tensor of a name.
        device: Of the model.

    Raises:
        SavedCacheError: If it names a class that this version of transformers lacks.
    """
    if not isinstance(tree, dict):
        return tree
    ((kind, what), *rest) = tree.items()
    if kind == "tensor":
        return tensor_of(what)
    if kind == "dtype":
        if not isinstance(dtype := getattr(torch, what), torch.dtype):
            raise TypeError(f"{what!r:.40} is no dtype")
        return dtype
    if kind == "device":
        return device
    if kind in ("list", "tuple"):
        items = [rebuild(item, tensor_of, device) for item in what]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {rebuild(key, tensor_of, device): rebuild(item, tensor_of, device) for key, item in what}
    if kind not in ("class", "object"):
        raise ValueError(f"it has a {kind!r:.40}")
    found = _class_of(*what)
    if kind == "class":
        return found
    made: Any = object.__new__(found)
    ((_, state),) = rest
    vars(made).update({key: rebuild(item, tensor_of, device) for key, item in state.items()})
    return made


def _is_of_transformers(kind: type) -> bool:
    """Whether it is a class of a cache, or of a cache's layer, that transformers itself has."""
    caches = sys.modules.get("transformers.cache_utils")  # whoever has such a cache has imported it
    if caches is None or kind.__module__.partition(".")[0] != "transformers":
        return False
    bases = caches.Cache, caches.CacheLayerMixin
    return kind.__module__ == caches.__name__ or issubclass(kind, bases)


def _class_of(module: str, name: str) -> type:
    found: Any = None
    if module.partition(".")[0] == "transformers":
        try:
            import_module("transformers.cache_utils")
            found = getattr(import_module(module), name, None)
        except (ImportError, ValueError):
            found = None
    if not isinstance(found, type) or not _is_of_transformers(found):
        raise SavedCacheError(
            f"The saved cache is a {module}.{name}, which this transformers lacks. Read the prompt again, or use the"
            " version of transformers that the cache was saved with."
        )
    return found
