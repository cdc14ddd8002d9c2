"""All tests: passes are verified, garbage collections few, and a graph that Inductor fails to compile is an error."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import setuptools  # noqa: F401  Inductor's first compile imports it, which is seconds: not under a test's timer or patch
from support.profiles import fresh_dynamo  # noqa: F401  and all that this module sets

from specache_fx.passes import pipeline

pipeline.verify_each = True


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collections: Dynamo's many objects set one off again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def inductor_compiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """A graph that Inductor fails to compile would run all the same: no test may pass so by accident."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("specache_fx.lowering")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if request.node.get_closest_marker("inductor_fails") is None:
        assert not [text for text in said if text.startswith("Inductor fails")]
