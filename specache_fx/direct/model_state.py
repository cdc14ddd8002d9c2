"""What a model's `forward` reads in Python, so that a graph of it is used no longer than that stays.

    modules      attributes, parameters, buffers and children of each; no hooks
    objects      those that they hold: configs, lists, dicts, and what these hold
    classes      of all modules, down to `nn.Module`: a method may be replaced
    globals      of the files that define them, and of those that all of them use

A value counts as the same if it is the same object, or equal. So this needs no list of what a graph depends on, as
Dynamo's guards are, and notices more than they do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _modules

_TRUSTED = ("torch", "transformers", "accelerate", "safetensors", "typing_extensions")
# Of a model: what generate() notes, and what calls it. No graph depends on them.
_OF_CALLS = frozenset(
    (
        *("_cache", "_compiled_call", "_compiled_call_impl", "_last_compile_config"),
        *("_previous_max_cache_length", "generation_config", "warnings_issued"),
    )
)
# What forward passes of transformers call in other files than their own.
_FILES = (
    *("torch", "torch.nn.functional", "transformers.cache_utils", "transformers.integrations.sdpa_attention"),
    *("transformers.masking_utils", "transformers.modeling_rope_utils", "transformers.utils.generic"),
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
)  # of a module; others run with gradients, or where it is loaded
_dict_version = getattr(torch._C._dynamo.guards, "dict_version", None)
_FORM = attrgetter("dtype", "device", "shape")
_LEAVES = (
    torch.Tensor,
    nn.Module,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    str,
    bytes,
)


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
        if not all(_is_trusted(method) for method in methods) or "forward" in vars(each):
            return f"{where} runs code of neither torch nor transformers"
        if each.training:
            return f"{where} is in training mode"
        if any(_is_own_code(value) for key, value in vars(each).items() if key not in _OF_CALLS):
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


class ModelState:
    """What a model reads, as it is now.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules, self._classes = list(module.modules()), _classes(module)
        self._no_hooks = [
            vars(each)[name] for each in self._modules for name in _HOOKS if not vars(each)[name]
        ]
        # Each dict, and what is read of it.
        self._reads: list[tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]] = []
        self._lists: list[list[Any]] = []
        self._seen: set[int] = set()
        for each in self._modules:
            kept = [name for name in vars(each) if name not in _OF_CALLS]
            # Others are added to a model while it generates, and to a file while Dynamo compiles.
            self._reads.append((vars(each), _values if len(kept) == len(vars(each)) else itemgetter(*kept)))
            for name in kept:
                if not name.endswith("_hooks"):
                    self._watch(vars(each)[name], 0)
        for file in _files(module):
            self._reads.append((vars(file), itemgetter(*vars(file))))
            for name, value in list(vars(file).items()):
                if type(value) is dict and not name.startswith("__"):
                    self._watch(value, 0)
                elif type(value).__module__.partition(".")[0] == "transformers":
                    # Functions of attention and masks are in such.
                    for held in (value, *vars(type(value)).values()):
                        if held is value or isinstance(held, dict):
                            self._watch(held, 0)
        self._dicts = [names for names, _ in self._reads]
        # A module's `to()` gives its weights other numbers, and they stay the same objects.
        self._weights = [*module.parameters(), *module.buffers()]
        self._versions = _versions_of(self._dicts)
        self._before = [read(names) for names, read in self._reads]
        self._others = self._read_others()

    def is_same(self) -> bool:
        """Whether nothing has changed."""
        if any(self._no_hooks) or _modules._has_any_global_hook():
            return False
        try:
            return self._has_same_values() and self._read_others() == self._others
        except (KeyError, RuntimeError, TypeError, ValueError):
            return False  # a name is gone, or there are other objects, which don't compare

    def _has_same_values(self) -> bool:
        """Whether the dicts hold what they did; of a model's thousands, those that were written are read."""
        versions = _versions_of(self._dicts)
        if versions == self._versions:
            return True
        for i, (names, read) in enumerate(self._reads):
            if versions[i] != self._versions[i] and read(names) != self._before[i]:
                return False
        self._versions = versions
        return True

    def _read_others(self) -> list[tuple[Any, ...]]:
        return [
            *map(tuple, self._lists),
            *map(_values, map(vars, self._classes)),
            tuple(map(type, self._modules)),
            *(tuple(map(read, self._weights)) for read in (_FORM, torch.Tensor.stride)),
        ]

    def _watch(self, value: Any, depth: int) -> None:
        """Watch what a value holds."""
        if isinstance(value, _LEAVES) or id(value) in self._seen or depth > 4:
            return
        names = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(value, (list, tuple)):
            inner = list(value)
            if isinstance(value, list):
                self._lists.append(value)
        elif names is not None:
            inner = list(names.values())
            self._reads.append((names, _values))
        else:
            return
        self._seen.add(id(value))
        for each in inner:
            self._watch(each, depth + 1)


def _versions_of(dicts: Sequence[dict[str, Any]]) -> list[Any]:
    """A number of each that is another one after each write; where torch has no such numbers, one of each question."""
    return [*map(_dict_version, dicts)] if _dict_version else [object() for _ in dicts]


def _values(names: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(names.values())
