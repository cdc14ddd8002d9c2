"""What CI leaves to `make test-all`: cases of the same kind as one that stays, and further random examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def examples(count: int) -> int:
    """How many examples of a property that takes seconds each: so many in CI, ten times as many at night."""
    return 10 * count if NIGHTLY else count


def nightly_unless(stays: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Parameters of which CI runs those that stay; a tuple is several arguments."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if stays(case) else [pytest.mark.nightly],
        )
        for case in cases
    ]
