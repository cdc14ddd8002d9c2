"""What `specache-fx eval` was asked for, as data: methods and tasks from their spelling on the command line."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Method
from specache_fx.eval.methods import METHODS, check_method
from specache_fx.eval.methods.press import PRESSES

# Those that quantise, and so have a width.
WITH_BITS = ("specache", "kivi", "quantized")
COMPILED = ("specache", "kivi", "kcache")


def read_spelling(text: str) -> tuple[str, dict[str, Any]]:
    """Read "name,option=value,..." as a name and its options: numbers, True, False, None, and all else as text.

    Raises:
        ConfigError: If it is spelt otherwise.
    """
    name, *parts = (part.strip() for part in text.split(","))
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not option or not equals:
            raise ConfigError(
                f"{text!r}: {part!r} is no option. Write name,option=value,...: specache,bits=1,top_k=32."
            )
        if option in options:
            raise ConfigError(f"{text!r}: {option!r} is given twice.")
        try:
            options[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[option] = {"true": True, "false": False}.get(value.lower(), value)
    return name, options


def read_methods(spellings: Sequence[str], bits: Sequence[int], lowering: str | None) -> list[Method]:
    """The methods, one for each width where a method has one and doesn't say which.

    Args:
        spellings: Such as "full", "specache,bits=1", "press:snapkv".
        bits: For methods with a width.
        lowering: For methods that compile.

    Raises:
        ConfigError: If a method is unknown, an option is, or `bits` or `lowering` would be for nobody.
    """
    methods: list[Method] = []
    used = set()
    for spelling in spellings:
        name, options = read_spelling(spelling)
        if name in COMPILED and lowering is not None and "lowering" not in options:
            options["lowering"] = lowering
            used.add("lowering")
        spread = bool(bits) and name in WITH_BITS and "bits" not in options
        if spread:
            used.add("bits")
        for width in bits if spread else [None]:
            full = options if width is None else {"bits": width, **options}
            budget = {"bytes": 1} if name in PRESSES and not {"bytes", "ratio"} & full.keys() else {}
            check_method(name, {**full, **budget})
            methods.append(Method.of(name, **full))
    if bits and "bits" not in used:
        raise ConfigError(
            f"--bits is for {', '.join(WITH_BITS)} without a width of their own: there is none."
        )
    if lowering is not None and "lowering" not in used:
        raise ConfigError(f"--lowering is for {', '.join(COMPILED)} without one of their own: there is none.")
    if twice := {str(method) for method in methods if methods.count(method) > 1}:
        raise ConfigError(f"Method {', '.join(sorted(twice))} is given twice.")
    methods.sort(key=needs_budget)
    if needs_budget(methods[-1]) and not any(method.name == "specache" for method in methods):
        raise ConfigError(
            f"{methods[-1].name} gets as many bytes as SpeCache takes: give --method specache too, or the bytes"
            f" ({methods[-1].name},bytes=400000) or the share to evict ({methods[-1].name},ratio=0.8)."
        )
    return methods


def needs_budget(method: Method) -> bool:
    """Whether it is a press that waits for the bytes of SpeCache."""
    return method.name in PRESSES and not {"bytes", "ratio"} & dict(method.options).keys()


def list_methods() -> str:
    """Their names, for help."""
    return ", ".join(METHODS)
