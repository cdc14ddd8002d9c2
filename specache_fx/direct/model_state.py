"""What a model's `forward` reads in Python, so that a graph of it is used no longer than that stays.

    modules      attributes, parameters, buffers, children and hooks of each
    objects      those that they hold: configs, lists, dicts, sets, and what these hold
    classes      of all modules, down to `nn.Module`: a method may be replaced
    globals      of the files that define them, and of those that all of them use
      -> dicts, lists and sets, and what each of them holds: `Contents`

So this needs no list of what a graph depends on, as Dynamo's guards are, and notices more than they do.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import guards
from torch.nn.modules import module as _modules

from specache_fx.runners.base import inference

_TRUSTED = ("torch", "transformers", "accelerate", "safetensors", "typing_extensions")
# Attributes of a module that no graph depends on: what generate() notes, what calls a model, and hooks that run with
# gradients or where it is loaded.
_UNREAD = {
    *("_cache", "_compiled_call", "_compiled_call_impl", "_last_compile_config"),
    *("_previous_max_cache_length", "generation_config", "warnings_issued"),
    *(name for name in vars(nn.Module()) if name.endswith("_hooks")),
} - {"_forward_hooks", "_forward_pre_hooks"}
# What forward passes of transformers call in other files than their own.
_FILES = (
    *("torch", "torch.nn.functional", "transformers.cache_utils", "transformers.integrations.sdpa_attention"),
    *("transformers.masking_utils", "transformers.modeling_rope_utils", "transformers.utils.generic"),
)
_LEAVES = (
    *(torch.Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(str, bytes, int, float, torch.SymInt, type(None)),
)
_PLAIN = (int, float, complex, str, bytes, torch.device)
_DEPTH = 6  # of what a module's attributes hold
_NOTHING = object()
_dict_version = getattr(guards, "dict_version", None)


class _PlainForms:
    """Torch's guards of tensors, for a torch that has them no more."""

    def __init__(self, *weights: torch.Tensor, **_: Any) -> None:
        self._before = self._of(weights)

    def check(self, *weights: torch.Tensor) -> bool:
        """Whether dtypes, devices, sizes and strides are the same."""
        return self._of(weights) == self._before

    @staticmethod
    def _of(weights: Sequence[torch.Tensor]) -> list[Any]:
        return [(each.dtype, each.device, each.shape, each.stride()) for each in weights]


_Forms: Any = getattr(guards, "TensorGuards", _PlainForms)


def reason_against(module: nn.Module) -> str | None:
    """Why a graph of this model can't stand for its `forward`; None where it can.

    A graph shows what tensors are computed. What else code does, to print or to count, it does while it is traced and
    not again. Code of torch and transformers does nothing else.
    """
    if _modules._has_any_global_hook() or any(map(_is_own_code, _hooks(module))):
        return "it has hooks, or all modules have"
    if _has_own_attention(module):
        return "its attention or mask is a function of neither torch nor transformers"
    for name, each in module.named_modules():
        where = f"{type(each).__name__} {name}".strip()
        methods = (type(each), type(each).forward, type(each).__call__)
        if not all(map(_is_trusted, methods)) or "forward" in vars(each):
            return f"{where} runs code of neither torch nor transformers"
        if each.training:
            return f"{where} is in training mode"
        if any(map(_is_own_code, _items(vars(each)).values())):
            return f"{where} has functions of neither torch nor transformers"
        tensors = (*each._parameters.values(), *each._buffers.values())
        if any(tensor is not None and type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
            return f"{where} has weights of a tensor subclass"
    owners: list[ModuleType | type] = [*_files(module), *_classes(module)]
    for owner in owners:
        for name, value in vars(owner).items():
            code = getattr(value, "__func__", getattr(value, "fget", value))
            is_named = not name.startswith("__compiled_fn")  # Dynamo leaves its functions there
            if is_named and isinstance(code, FunctionType) and not _is_trusted(code):
                return f"{name} of {owner.__name__} is a function of neither torch nor transformers"
    return None


def _classes(module: nn.Module) -> list[type]:
    """Classes of a model. Tracers replace methods of `nn.Module` for a while."""
    classes = dict.fromkeys(cls for each in module.modules() for cls in type(each).__mro__)
    return [each for each in classes if each not in (nn.Module, object)]


def _files(module: nn.Module) -> list[ModuleType]:
    """Files that have the code of a model's forward."""
    defines = (each for each in _classes(module) if not vars(each).keys().isdisjoint(("forward", "__call__")))
    names = {each.__module__ for each in defines} | {*_FILES}
    return [sys.modules[name] for name in sorted(names & {*sys.modules})]


def _is_own_code(value: Any) -> bool:
    """Whether a value is code that a user may have put there."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, (nn.Module, torch.Tensor, BuiltinFunctionType)) or not callable(value):
        return False
    # A method belongs to an object whose state nobody watches.
    return isinstance(value, MethodType) or not _is_trusted(
        value if hasattr(value, "__qualname__") else type(value)
    )


def _has_own_attention(module: nn.Module) -> bool:
    """Whether a user has given transformers the attention or the mask that the model uses."""
    configs = (getattr(each, "config", None) for each in module.modules())
    used = {"sdpa", *(getattr(config, "_attn_implementation", None) for config in configs)}
    registries = [
        getattr(sys.modules.get(f"transformers.{file}"), name, {})
        for file, name in (
            ("modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
            ("masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
        )
    ]
    return any(_is_own_code(registry.get(name)) for registry in registries for name in used)


def _is_trusted(of: Any) -> bool:
    """Whether code is torch's or transformers', or Python's own; a wrapper is no more than what it wraps."""
    files = []
    while isinstance(of, FunctionType):
        files.append(of.__globals__.get("__name__"))
        of = getattr(of, "__wrapped__", None)
    files += [] if of is None else [getattr(of, "__module__", "")]
    names = [str(file).partition(".")[0] for file in files]
    return all(name in _TRUSTED or (name in sys.stdlib_module_names and name != "__main__") for name in names)


def _hooks(module: nn.Module) -> Iterator[Any]:
    for each in module.modules():
        yield from each._forward_hooks.values()
        yield from each._forward_pre_hooks.values()


def has_hooks(module: nn.Module) -> bool:
    """Whether a module in it, or all modules, have a hook of forward calls."""
    return _modules._has_any_global_hook() or any(True for _ in _hooks(module))


class Contents:
    """What dicts, lists and sets hold, as it is now.

    Args:
        holders: They, see `held_by`.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        holders = list({id(each): each for each in holders}.values())
        self._empty = [each for each in holders if not each]  # most of a module's
        self._dicts = [each for each in holders if each and isinstance(each, dict)]
        self._others = [(each, _items(each)) for each in holders if each and not isinstance(each, dict)]
        self._versions = _versions_of(self._dicts)
        self._before = list(map(_items, self._dicts))

    def is_same(self) -> bool:
        """Whether nothing has changed: each value is the same object, or a plain one that is equal."""
        if any(self._empty) or not all(_holds(each, then) for each, then in self._others):
            return False
        versions = _versions_of(self._dicts)
        if versions != self._versions:  # of a model's thousands, those that were written are read
            numbers = zip(self._dicts, self._before, self._versions, versions, strict=True)
            if not all(_holds(each, then) for each, then, before, number in numbers if before != number):
                return False
            self._versions = versions
        return True


def _holds(holder: Any, then: dict[Any, Any]) -> bool:
    """Whether a dict, list or set holds what it did."""
    now = _items(holder)
    if len(now) != len(then) and "__name__" not in then:  # others are added to a file while Dynamo compiles
        return False
    return all(map(_is_same, then.values(), (now.get(name, _NOTHING) for name in then)))


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and old == new)


def held_by(values: Iterable[Any]) -> Iterator[Any]:
    """The dicts, lists and sets that values are or have, and that these hold."""
    seen: dict[int, Any] = {}
    for _ in range(_DEPTH):
        level: dict[int, Any] = {}
        for value in values:
            if not isinstance(value, _LEAVES):
                is_holder = isinstance(value, (dict, list, set, tuple))
                holder = value if is_holder else getattr(value, "__dict__", ())
                level[id(holder)] = holder
        level = {key: each for key, each in level.items() if key not in seen}
        seen |= level
        values = [value for each in level.values() for value in _items(each).values()]
    return (each for each in seen.values() if not isinstance(each, tuple))


def _items(holder: Any) -> dict[Any, Any]:
    """What a dict, list, set or tuple holds, but for attributes of a module that no graph depends on."""
    if not isinstance(holder, dict):
        return dict(enumerate(holder))
    items = dict(holder.items())
    for name in _UNREAD if "_modules" in items else ():
        items.pop(name, None)
    return items


def _versions_of(dicts: Sequence[dict[Any, Any]]) -> list[Any]:
    """A number of each that is another one after each write; where torch has no such numbers, one of each question."""
    return [*map(_dict_version, dicts)] if _dict_version else [object() for _ in dicts]


class ModelState:
    """What a model reads, as it is now.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules, self._weights = list(module.modules()), [*module.parameters(), *module.buffers()]
        self._types, files = list(map(type, self._modules)), list(map(vars, _files(module)))
        methods = [
            held for cls in _classes(module) for held in gc.get_referents(vars(cls))
        ]  # no mere proxies
        held = held_by([*map(vars, self._modules), *_tables(files)])
        self._contents = Contents([*held, *methods, *files])
        forms = {
            "dynamic_dims_sizes": [list(each.shape) for each in self._weights],
            "dynamic_dims_strides": [list(each.stride()) for each in self._weights],
        }
        with inference():
            self._forms = _Forms(*self._weights, **forms)

    def is_same(self) -> bool:
        """Whether nothing has changed."""
        if _modules._has_any_global_hook() or list(map(type, self._modules)) != self._types:
            return False
        with inference():  # of a fixed mode, which the check depends on
            # A module's `to()` gives its weights other numbers, and they stay the same objects.
            return self._forms.check(*self._weights) and self._contents.is_same()


def _tables(files: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Globals that functions look something up in: of attention, of masks."""
    for name, value in (item for file in files for item in [*file.items()]):
        if type(value) is dict and not name.startswith("__"):
            yield value
        elif type(value).__module__.partition(".")[0] == "transformers":
            yield from (value, *(each for each in vars(type(value)).values() if isinstance(each, dict)))
