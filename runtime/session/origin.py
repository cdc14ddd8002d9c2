"""`Origin`: whose numbers a session holds, for a saved cache."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from specache_fx.errors import SavedCacheError

Values = Mapping[str, Mapping[str, str]]  # of `specache_fx.direct.traced_values`: module, attribute, value

_INT = re.compile(r"-?\d+")
_AGAIN = "Read its tokens again, with one model as it is now, and save that cache."


@dataclass
class Origin:
    """What the graphs read that a session's tokens went through.

    Attributes:
        model_config: Config of the model, whose entries no graph names: of a prompt that was not traced.
        layers_of_cache: The session's layers are those of the model's cache object: its graphs may have others.
    """

    model_config: object = None
    layers_of_cache: bool = False
    _weights: dict[str, tuple[weakref.ref[torch.Tensor], int | None]] = field(default_factory=dict)
    _changed: str | None = None  # a name that is not of one weight alone, in all graphs
    _values: list[Values | None] = field(default_factory=list)

    def copy(self) -> Origin:
        """Of a fork."""
        return replace(self, _weights={**self._weights}, _values=[*self._values])

    def knows(self, values: Values | None, name: str, weight: object) -> bool:
        """Whether a graph with this object as its constants was noted, and with this weight of that name."""
        held, _ = self._weights.get(name, (None, None))
        is_same = held is not None and held() is weight
        return is_same and any(each is values for each in self._values)

    def has(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether one of these weights was noted, by whatever name."""
        noted = {id(weight) for held, _ in self._weights.values() if (weight := held()) is not None}
        return any(id(weight) in noted for weight in weights)

    def note(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        values: Values | None,
        of_call: Values | None = None,
    ) -> None:
        """Tokens go through a graph.

        Args:
            weights: Names and weights.
            values: Its constants, for `knows` the same object each time; None where they can't be read.
            of_call: Values that are its inputs, or of a call without a graph.
        """
        for name, weight in weights:
            held, version = self._weights.setdefault(name, (weakref.ref(weight), _version(weight)))
            if held() is not weight or version != _version(weight):  # `==` of references compares numbers
                self._changed = name
        if not any(each is values for each in self._values):
            self._values.append(values)
        if of_call and of_call not in self._values:
            self._values.append(of_call)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights, by name.

        Raises:
            SavedCacheError: If one is gone, or not what it was; or none is known.
        """
        found: dict[str, torch.Tensor] = {}
        for name, (held, version) in self._weights.items():
            weight = held()
            if weight is None:
                raise SavedCacheError(
                    f"The model of this cache is gone (its weight {name!r}), and a saved cache names its model by"
                    " its weights. Save the cache while the model is there."
                )
            if name == self._changed or version != _version(weight):
                raise SavedCacheError(
                    f"The weight {name!r} of this cache's model has changed since the cache's first tokens were read."
                    f" Or two modules in one compiled function share its name. {_AGAIN}"
                )
            found[name] = weight
        if not found:
            raise SavedCacheError(
                "The model of this cache is unknown: the graph that made it read no parameter of a module. Compile the"
                " module, not a function that is given its weights."
            )
        return found

    def values(self) -> dict[str, dict[str, str]]:
        """The constants. An int that differs from graph to graph counts tokens, and is left out.

        Raises:
            SavedCacheError: If another one differs, or they can't be read.
        """
        found: dict[str, dict[str, str]] = {}
        counts = set()
        for noted in self._values:
            if noted is None:
                raise SavedCacheError(
                    "specache can't tell which numbers of the model this cache depends on, nor whose a saved one is:"
                    f" torch {torch.__version__} hides them (a warning at the model's first call says so), or two"
                    " modules in one compiled function have one name. Compile the model alone."
                )
            for module, values in noted.items():
                mine = found.setdefault(module, {})
                for attribute, value in values.items():
                    before = mine.setdefault(attribute, value)
                    if before != value and _INT.fullmatch(before) and _INT.fullmatch(value):
                        counts.add((module, attribute))
                    elif before != value:
                        place = " of ".join(filter(None, (attribute, module or "the model")))
                        raise SavedCacheError(
                            f"{place} was {before} when this cache's first tokens were read, and"
                            f" then {value}. {_AGAIN}"
                        )
        for module, attribute in counts:
            del found[module][attribute]
        return found


def _version(weight: torch.Tensor) -> int | None:
    """Of a parameter's numbers. Buffers may be a state that each step writes; inference tensors have no version."""
    return weight._version if isinstance(weight, nn.Parameter) and not weight.is_inference() else None
