"""Hypothesis profiles, threads, and a clean Dynamo for those tests that compile."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import setuptools  # noqa: F401  Inductor's first compile imports it, which is seconds: not under a test's timer or patch
import torch
from hypothesis import HealthCheck, settings
from support import triton_mode  # noqa: F401  first of all: Triton decides on import whether it interprets

# Drawing a model builds it, which hypothesis would call slow data generation.
_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=20, suppress_health_check=_SLOW_IS_FINE, database=None
)
settings.register_profile("nightly", deadline=None, max_examples=500, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# The tensors are small, and one process a core runs already: more threads only get into each other's way.
torch.set_num_threads(1)


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


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled code before and after, so that recompile counts and limits are the test's own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
