"""Python values of a module that a graph was traced with: a saved cache belongs to them as to the weights.

Dynamo puts a module's numbers, names and flags into the graph as constants, and guards each. So its guards name what
the graph depends on, and nothing else of the module:

    guard   L['self']._modules['layers']._modules['0']._modules['q_proj'].scaling['default'] == 2.0
    noted   {"layers.0.q_proj": {"scaling['default']": "2.0"}}

Names begin at the outermost module. They are the same in each process, and `differing` reads them off a model that was
never traced. Values are text: it is compared, and shown in messages.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from hashlib import sha256
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.fx import Node
from torch.nn.modules.dropout import _DropoutNd

from specache_fx._log import warn_once
from specache_fx.capture.graph.graph_utils import source_name

logger = logging.getLogger(__name__)

Values = dict[str, dict[str, str]]  # module, attribute of it, value
Step = str | tuple[str | int]  # an attribute's name, or a key in a tuple

_NOTHING = object()
_STEP = re.compile(r"""\.([A-Za-z_]\w*)|\[(-?\d+)\]|\['([^'\\]*)'\]|\["([^"\\]*)"\]""")
_OF_CLASS = re.compile(r"(?:dict\()?type\(([^()]*)\)(?:\.__mro__\[\d+\])?\.__dict__\)?\['(\w+)'\]")
# Flags and counts that traced code has set so far, by class: a model's first call sets one that the next one reads.
_states: set[tuple[type, str]] = set()
_LONGEST = 200  # characters of a value that is kept as it is
# What no number depends on as long as nothing is trained: flags for that, and a module's hooks.
_SILENT = {*vars(nn.Module()), "gradient_checkpointing"} - {"_modules", "_parameters", "_buffers"}
# Entries of a config that no computed number depends on, or that the weights tell. Equal models may differ in them.
_SILENT_IN_CONFIG = re.compile(
    "architectures|(torch_)?dtype|id2label|label2id|is_decoder|output_(attentions|hidden_states)|problem_type"
    "|return_dict|transformers_version|use_cache|_.*|.*(token_id|dropout).*"
)


def is_silent(entry: str) -> bool:
    """Whether no number that is computed depends on this entry of a config."""
    return _SILENT_IN_CONFIG.fullmatch(entry) is not None


# While Dynamo traces --------------------------------------------------------------------------------------------------


def values_behind(inputs: Sequence[Node]) -> tuple[Values | None, dict[int, tuple[str, str]]]:
    """The values that are constants of the graph which Dynamo is compiling.

    Args:
        inputs: The graph's placeholders.

    Returns:
        The values, None where this torch has no such guards, or two modules share a name. And module and attribute of
        each float that is an input of the graph instead, by position.
    """
    try:
        return _read_guards(inputs)
    except Exception as error:
        warn_unreadable("a graph's guards", error, "Caches of its model can't be saved.")
        return None, {}


def _read_guards(inputs: Sequence[Node]) -> tuple[Values | None, dict[int, tuple[str, str]]]:
    context, found = TracingContext.try_get(), Values()
    if context is None:
        return found, {}
    output = InstructionTranslator.current_tx().output
    scope = {"L": output.local_scope, "G": output.global_scope}
    moving, floats = {steps for steps, _ in new_values(output.side_effects)}, {}
    _states.update(
        (type(place.owner), place.attribute) for steps in moving if (place := _placed(scope, steps))
    )
    for i, node in enumerate(inputs):
        steps = steps_of(source_name(getattr(node.meta.get("grapharg"), "source", None)))
        place = _placed(scope, steps)
        if place is not None and isinstance(place.value, float):
            floats[i] = place.module, place.attribute
        if place is not None and isinstance(place.value, (int, float)):
            moving.add(steps)
    noted = set()
    for guard in context.guards_context.dynamo_guards:
        name = source_name(guard.originating_source)
        with_keys = guard.create_fn_name().startswith("DICT_KEYS")
        if "_hooks" in name or (name, with_keys) in noted:
            continue
        noted.add((name, with_keys))
        steps = steps_of(name)
        if not moving.isdisjoint(steps[:n] for n in range(1, len(steps) + 1)):
            continue
        place = _placed(scope, steps)
        if place is None or (isinstance(place.value, dict) and not with_keys):
            continue
        if isinstance(place.value, int) and (type(place.owner), place.attribute) in _states:
            continue
        text = _plain_value(place.value)
        if text is not None and found.setdefault(place.module, {}).setdefault(place.attribute, text) != text:
            return None, {}  # two modules in one compiled function have this name
    return found, floats


def warn_unreadable(what: str, error: Exception, otherwise: str) -> None:
    """Another torch may have other internals: the model runs all the same."""
    torch_is = f"torch {torch.__version__} ({type(error).__name__}: {error})"
    warn_once(logger, f"specache: {what} can't be read in {torch_is}. {otherwise}")


def new_values(side_effects: Any) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """What the traced code itself sets, and Dynamo's variable of the new value.

    It counts or remembers: the next call finds another value.
    """
    for variable in side_effects.id_to_variable.values():
        steps = steps_of(source_name(variable.source))
        if not steps or not side_effects.is_modified(variable):
            continue
        attributes = side_effects.store_attr_mutations.get(variable)
        if attributes is None:
            yield steps, variable
        else:
            yield from (((*steps, name), new) for name, new in attributes.items())


class _Place(NamedTuple):
    owner: nn.Module
    module: str  # its name
    attribute: str
    value: Any


def _placed(scope: Any, steps: Sequence[Step]) -> _Place | None:
    """What Dynamo reads, if it is a module's and numbers can depend on it."""
    owner: nn.Module | None = None
    in_adapter = False
    names: list[str] = []
    rest: tuple[Step, ...] = ()  # from the owner on
    value, in_config = scope, False
    for step in steps:
        if owner is not None:
            rest = (*rest, step)
            if isinstance(step, str) and (_is_training(step) or step[:2] == "__"):
                return None
            if in_config and isinstance(step, str) and is_silent(step):
                return None
        value = step_into(value, step)
        if isinstance(value, property):  # code
            return None
        in_config = hasattr(type(value), "to_dict")
        if isinstance(value, nn.Module) and (owner is None or rest[:-1] == ("_modules",)):
            names += [str(step[0])] if rest else []
            in_adapter = any(map(_is_adapter, (owner, value)))
            owner, rest = value, ()
    if owner is None or isinstance(owner, _DropoutNd) or (in_adapter and isinstance(value, dict)):
        return None
    return _Place(owner, ".".join(names), _spelt(rest), value)


# Of any model ---------------------------------------------------------------------------------------------------------


def values_of(model: nn.Module) -> Values:
    """Factors, flags and names of a model's modules: of one that no graph has read yet. Sizes show in its weights."""
    found: Values = {}
    for name, owner in model.named_modules():
        if isinstance(owner, _DropoutNd):
            continue
        noted = {
            attribute: repr(value)
            for attribute, value in vars(owner).items()
            if type(value) in (bool, float, str) and attribute[:1] != "_" and not _is_training(attribute)
        }
        if not owner._modules:
            noted[""] = str(_plain_value(owner))  # an activation has nothing but its class
        if noted := noted | _adapter_values(owner):
            found[name] = noted
    return found


def _is_training(attribute: str) -> bool:
    """Whether no number depends on an attribute of a module as long as nothing is trained."""
    return attribute in _SILENT or "dropout" in attribute


def used_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights of a model that no graph has read yet, but for those of adapters that are not active."""
    unused: set[int] = set()
    for owner in filter(_is_adapter, cast(Any, model.modules())):
        kept = _active(owner)
        for container in (getattr(owner, name, {}) for name in type(owner).adapter_layer_names):
            for key, part in container.items() if hasattr(container, "items") else ():
                if key not in kept:
                    unused.update(map(id, part.parameters() if isinstance(part, nn.Module) else [part]))
    return ((name, weight) for name, weight in model.named_parameters() if id(weight) not in unused)


def _is_adapter(owner: Any) -> bool:
    """Whether a module is PEFT's: it has all adapters in dicts, and uses the active ones."""
    return hasattr(type(owner), "adapter_layer_names")


def _active(owner: Any) -> list[str]:
    """The adapters that a module of PEFT's adds to its layer."""
    if getattr(owner, "_disable_adapters", False) or getattr(owner, "merged_adapters", ()):
        return []
    active = getattr(owner, "_active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def _adapter_values(owner: Any) -> dict[str, str]:
    """What of a module of PEFT's says which adapters count, and how much."""
    if not _is_adapter(owner):
        return {}
    names = ["_active_adapter", "_disable_adapters", "merged_adapters"]
    names += [f"scaling[{name!r}]" for name in _active(owner)]
    return {name: str(_plain_value(value)) for name in names if (value := _at(owner, name)) is not _NOTHING}


def differing(model: nn.Module, values: Values) -> str | None:
    """The first of these values that a model doesn't have, as half a sentence; None where it has all.

    None of its code runs, whatever the names are.
    """
    for module, noted in values.items():
        owner, rest = _owner_of(model, module)
        for attribute, value in noted.items():
            mine = (None if rest else _plain_value(_at(owner, attribute))) or "nothing"
            if mine != value:
                name = " of ".join(filter(None, (attribute, module))) or "the model"
                return f"has {mine} as {name}, not {value}"
    return None


def tensor_of(model: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter, buffer or other tensor of a model, by its `weight_name`."""
    owner, last = _owner_of(model, name)
    found = owner._parameters.get(last, owner._buffers.get(last))
    found = _at(owner, last) if found is None else found
    return found if isinstance(found, torch.Tensor) else None


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The innermost module on the way to a name, and the rest of the name."""
    first, _, rest = name.partition(".")
    inner = model._modules.get(first)
    return _owner_of(inner, rest) if isinstance(inner, nn.Module) else (model, name)


def _at(owner: Any, attribute: str) -> Any:
    for step in steps_of(f"L.{attribute}")[1:] if attribute else ():
        owner = step_into(owner, step)
    return owner


def step_into(value: Any, step: Step) -> Any:
    """An attribute or item, without running code of the value's."""
    if isinstance(step, tuple):
        (key,) = step
        if isinstance(value, dict):
            return dict.get(value, key, _NOTHING)
        is_place = (
            isinstance(value, (list, tuple)) and isinstance(key, int) and -len(value) <= key < len(value)
        )
        return value[key] if is_place else _NOTHING
    if isinstance(value, nn.Module) and step in value.__dict__:  # mostly, and ten times as fast
        return value.__dict__[step]
    found = inspect.getattr_static(value, step, _NOTHING)
    if isinstance(found, (MemberDescriptorType, GetSetDescriptorType)) and not isinstance(value, type):
        try:
            return found.__get__(value)
        except AttributeError:
            return _NOTHING
    return found


def steps_of(name: str) -> tuple[Step, ...]:
    """An expression of Dynamo's in its parts: of `L['self'].scale['a']` `(("L",), ("self",), "scale", ("a",))`.

    An attribute of a class counts as its instance's. Empty for calls.
    """
    text = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name.replace(".__class__", ""))
    while text != (text := _OF_CLASS.sub(r"\1.\2", text)):
        pass
    steps: list[Step] = [(text[:1],)]
    end = 1
    while end < len(text):
        match = _STEP.match(text, end)
        if match is None:
            return ()
        attribute, index, one, two = match.groups()
        steps.append(attribute or (int(index) if index else one or two or "",))
        end = match.end()
    return tuple(steps) if text[:1] in ("L", "G") else ()


def _spelt(steps: Sequence[Step]) -> str:
    return "".join(f".{step}" if isinstance(step, str) else f"[{step[0]!r}]" for step in steps).removeprefix(
        "."
    )


def _plain_value(value: Any) -> str | None:
    """A value as text that is the same in each process; None for what is compared elsewhere, or can't be."""
    if isinstance(value, (Enum, torch.dtype)) or value is None:
        return str(value)
    plain = next((kind for kind in (bool, int, float, complex, str) if isinstance(value, kind)), None)
    if plain is not None:
        text = plain.__repr__(value)  # NumPy's numbers are Python's, and have a spelling of their own
    elif isinstance(value, nn.Module):
        text = f"a {type(value).__qualname__}"
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        text = f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, (set, frozenset)):
        text = f"{{{', '.join(sorted(map(str, map(_plain_value, value))))}}}"  # sets have no order
    elif isinstance(value, (dict, list, tuple)):
        kept = [
            type(each).__qualname__ if isinstance(each, (dict, list, tuple)) else _plain_value(each)
            for each in value
        ]
        text = f"{'keys ' * isinstance(value, dict)}[{', '.join(map(str, kept))}]"
    else:
        return None
    return text if len(text) <= _LONGEST else f"{text[:20]}... ({sha256(text.encode()).hexdigest()[:16]})"
