"""Hypothesis profiles, threads, and a clean Dynamo for those tests that compile: for each `conftest.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
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


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget compiled code before and after, so that recompile counts and limits are the test's own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
