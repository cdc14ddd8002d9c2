"""The form that a value out of a file has to have: checked once, before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Form = Any  # see `check`


class FormError(ValueError):
    """A part of a value has another form; the message names it."""


def parse(text: str) -> Any:
    """A JSON text as a value.

    Raises:
        FormError: If it is none, names an entry twice, or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_entries)
    except (ValueError, RecursionError) as error:
        raise FormError(
            f"the header is no JSON that can be read ({error or type(error).__name__})"
        ) from error


def _entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormError("an entry comes twice")
    return found


def check(value: Any, form: Form, part: str) -> None:
    """Compare a value with a form.

    Args:
        value: Of `parse`.
        form: `{"name": ...}` for these entries, `{str: ...}` for any; `[...]` for a list; a range of ints, a
            frozenset of strings, a type, `None`, or a tuple of these for one of them. A bool is no int.
        part: Name of the value, for the message.

    Raises:
        FormError: If it has another.
    """
    if isinstance(form, list):
        _expect(isinstance(value, list), value, part, "a list")
        for i, item in enumerate(value):
            check(item, form[0], f"{part}[{i}]")
    elif isinstance(form, Mapping) and str in form:
        _expect(isinstance(value, dict), value, part, "a mapping")
        for name, item in value.items():
            check(item, form[str], f"{part}[{name!r:.40}]")
    elif isinstance(form, Mapping):
        _expect(
            isinstance(value, dict) and value.keys() == form.keys(), value, part, f"the entries {[*form]}"
        )
        for name, item in form.items():
            check(value[name], item, f"{part}.{name}" if part else name)
    else:
        choices = form if isinstance(form, tuple) else (form,)
        _expect(any(_is(value, each) for each in choices), value, part, " or ".join(map(_name, choices)))


def _is(value: Any, form: Form) -> bool:
    if isinstance(form, range):
        return type(value) is int and value in form
    if isinstance(form, frozenset):
        return type(value) is str and value in form
    return value is None if form is None else type(value) is form


def _name(form: Form) -> str:
    if isinstance(form, range):
        return f"a whole number of {form.start:,} to {form.stop - 1:,}"
    if isinstance(form, frozenset):
        return f"one of {', '.join(map(repr, sorted(form)))}"
    return "null" if form is None else str(form.__name__)


def _expect(fits: bool, value: Any, part: str, expected: str) -> None:
    if not fits:
        found = f"a {type(value).__name__}" if isinstance(value, (dict, list)) else f"{value!r:.80}"
        raise FormError(f"{part or 'the header'} is {found}: expected {expected}")
