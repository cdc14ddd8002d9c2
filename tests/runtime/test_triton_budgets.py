"""Triton's kernels compile to machine code for GPUs, on a machine without one, and stay within their registers."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.triton_mode import needs_compiler

TESTS = Path(__file__).parents[1]
MOST_REGISTERS = 168  # a thread: three blocks of 128 threads have a multiprocessor's 65,536


@functools.cache
def _compiled(part: str) -> list[dict[str, Any]]:
    """What each kernel takes, by config and compute capability."""
    command = [sys.executable, "-m", "support.triton_compile", part]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@needs_compiler
@pytest.mark.slow
def test_kernels_keep_to_their_registers_at_the_shape_of_llama():
    found = _compiled("llama")
    assert {each["kernel"] for each in found} >= {
        "rotate_queries",
        "partial_attention",
        "selection_scores",
        "merge_parts",
    }
    assert {each["kernel"] for each in found} >= {
        "plan_slots",
        "copy_rows",
        "_best_of_blocks",
        "_count_overlap",
    }
    assert {each["sm"] for each in found} == {80, 90}
    over = [each for each in found if each["spilled"] or each["registers"] > MOST_REGISTERS]
    assert not over


@needs_compiler
@pytest.mark.slow
def test_loads_of_codes_begin_an_iteration_ahead_at_the_shape_of_llama():
    reading = [
        each for each in _compiled("llama") if each["kernel"] in ("partial_attention", "selection_scores")
    ]
    assert reading and all(each["async_copies"] for each in reading)


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("part", ["forms", "others"])
def test_other_forms_compile_for_gpus(part):
    assert {each["sm"] for each in _compiled(part)} == {80, 90}
