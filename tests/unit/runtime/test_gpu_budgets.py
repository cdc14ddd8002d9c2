"""What a layer of a decode step may cost the host of a GPU, by a fake driver; see `support/gpu_host_cost.py`."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from support.process import python
from support.triton_mode import needs_compiler

# The next product waits for these; the rest runs beside it, and with a captured step none costs the host anything.
CRITICAL = ["rotate_queries", "partial_attention", "merge_parts"]
# Beyond 2,048 tokens a selection takes two rounds.
BESIDE = ["selection_scores", "_best_of_blocks", "_best_of_blocks", "plan_slots", "copy_rows"]
COUNTED = ["_best_of_blocks", "_best_of_blocks", "_count_overlap"]

MOST_ATEN = 3
# Calls of an empty Python method that take as long as a layer's launches, without what a launcher does in C. A captured
# step costs none of it.
MOST_CALLS = 1400  # 1,000 to 1,200 measured, 720 to 760 without hit rates: 85 and 60 us on a slow machine


@functools.cache
def measured() -> dict[str, Any]:
    return json.loads(python("-m", "support.gpu_host_cost"))  # type: ignore[no-any-return]


@needs_compiler
@pytest.mark.slow
def test_layer_keeps_to_its_launches_operators_and_time():
    found = measured()["layer"]
    assert found["launches"] == CRITICAL
    assert found["beside"] == BESIDE + COUNTED
    assert found["aten"] <= MOST_ATEN, found["operators"]
    assert found["calls"] <= MOST_CALLS, found["us"]
    assert found["as_triton_binds"]


@needs_compiler
@pytest.mark.slow
def test_hit_rates_are_launched_behind_the_prefetch_and_cost_few_operators():
    with_rates, without = (measured()[name] for name in ("layer", "layer_without_hit_rates"))
    assert without["beside"] == BESIDE
    assert with_rates["aten"] - without["aten"] <= 1


@needs_compiler
@pytest.mark.slow
def test_attention_is_tuned_again_for_other_lanes_and_longer_stretches_and_not_for_each_length():
    two_lanes, one_lane, some_more, many_more = measured()["tuned"]
    assert one_lane == two_lanes + 1
    assert some_more == one_lane
    assert many_more == one_lane + 1
