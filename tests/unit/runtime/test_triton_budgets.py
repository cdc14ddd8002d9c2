"""Triton's kernels compile to machine code for GPUs, on a machine without one, and stay within their registers."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from support.process import python
from support.triton_mode import needs_compiler

MOST_REGISTERS = 168  # a thread: three blocks of 128 threads have a multiprocessor's 65,536
# That four warps execute on average for 64 tokens, on sm_90: of any config, and of the best one for centred codes.
MOST_INSTRUCTIONS = 700
BEST_INSTRUCTIONS = {"partial_attention": 345, "selection_scores": 215}


@functools.cache
def _compiled(part: str, sm: int = 90) -> list[dict[str, Any]]:
    """What each kernel takes, by config, for a compute capability."""
    printed = python("-m", "support.triton_compile", part, str(sm))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "sm"),
    [("usual", 90), *(pytest.param("llama", sm, marks=pytest.mark.nightly) for sm in (80, 90))],
)
def test_kernels_keep_to_their_budgets_at_the_shape_of_llama(part, sm):
    """Registers; and on sm_90 loads an iteration ahead, instructions, and how wide rows are read. One config a day."""
    found = _compiled(part, sm)
    attention = {"rotate_queries", "partial_attention", "selection_scores", "merge_parts"}
    assert {each["kernel"] for each in found} >= attention | {
        *("plan_slots", "copy_rows", "_best_of_blocks", "_count_overlap")
    }
    assert {each["sm"] for each in found} == {sm}
    assert not [each for each in found if each["spilled"] or each["registers"] > MOST_REGISTERS]
    if sm == 90:
        reading = [each for each in found if each["kernel"] in ("partial_attention", "selection_scores")]
        assert reading and all(each["async_copies"] for each in reading)
        assert_few_instructions([each for each in found if "loop" in each])
        assert_wide_loads([each for each in found if "row_loads" in each])


def assert_few_instructions(reading):
    """Of the loops over codes."""
    assert not [each for each in reading if each["for_64_tokens"] > MOST_INSTRUCTIONS]
    for kernel, most in BEST_INSTRUCTIONS.items():
        centred = [each for each in reading if each["kernel"] == kernel and each["centred"]]
        assert centred and max(each["for_64_tokens"] for each in centred if each["block"] == 64) <= most
        # Numbers are made by logic alone: what is converted are the softmax's weights, and masks.
        assert all(each["loop"]["conversions"] <= 16 for each in centred)


def assert_wide_loads(reading):
    """16 bytes at a time: four warps read 64 rows of 128 channels, keys alone or with values; bytes are masks'."""
    assert reading
    for each in reading:
        (rows,) = each["row_loads"]
        assert rows["16"] >= {"partial_attention": 16, "selection_scores": 8}[each["kernel"]]
        assert "2" not in rows


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("part", ["forms", "others"])
def test_other_forms_compile_for_gpus(part, sm):
    assert {each["sm"] for each in _compiled(part, sm)} == {sm}
