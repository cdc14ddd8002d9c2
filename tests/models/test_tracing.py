"""`specache_fx.trace`: what it records of real steps, and what must hold of the overlap that it shows."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo import TWO_LANES, build

import specache_fx
from specache_fx.runtime import tracing

STEPS = 6
OPTIONS = TWO_LANES | {"bits": 2, "group_size": 4, "residual_length": 4, "top_k": 4}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The events of a generation of `STEPS` decode steps."""
    torch._dynamo.reset()
    tmp_path, model = tmp_path_factory.mktemp("trace"), build("plain").eval()
    model.compile(backend="specache", options=OPTIONS)
    ids = torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    with specache_fx.trace(tmp_path / "trace.json"):
        model.generate(ids, max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, do_sample=False)
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return events


def spans(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def test_trace_has_every_step_and_what_each_layer_does_in_it(traced: list[dict[str, Any]]) -> None:
    layers = {event["args"]["layer"] for event in spans(traced, "attention")}
    assert layers == {0, 1}
    runs = STEPS + 1  # and pre-decode
    assert (len(spans(traced, "pre-decode")), len(spans(traced, "decode step"))) == (1, STEPS)
    for name in ("attention", "append", "select", "prefetch"):
        assert len(spans(traced, name)) == runs * len(layers), name
    lengths = [event["args"]["kv_len"] for event in spans(traced, "decode step")]
    assert lengths == list(range(20, 20 + STEPS))


def test_copies_have_a_track_of_their_own(traced: list[dict[str, Any]]) -> None:
    names = {event["tid"]: event["args"]["name"] for event in traced if event["ph"] == "M"}
    tracks: dict[str, set[str]] = defaultdict(set)
    for event in traced:
        if event["ph"] == "X":
            tracks[event["name"]].add(names[event["tid"]])
    assert tracks["prefetch"] == {"copies"}
    assert tracks["attention"] == tracks["decode step"] == {"compute"}
    assert {event["tid"] for event in spans(traced, "prefetch")}.isdisjoint(
        event["tid"] for event in spans(traced, "attention")
    )


def test_no_copy_runs_while_its_layer_reads_the_slots(traced: list[dict[str, Any]]) -> None:
    for copy in spans(traced, "prefetch"):
        for read in spans(traced, "attention"):
            if copy["args"] == read["args"]:
                assert copy["ts"] + copy["dur"] <= read["ts"] or read["ts"] + read["dur"] <= copy["ts"]


def test_what_lies_in_a_step_is_within_it(traced: list[dict[str, Any]]) -> None:
    steps = [*spans(traced, "pre-decode"), *spans(traced, "decode step")]
    for read in spans(traced, "attention"):
        around = [
            s
            for s in steps
            if s["ts"] <= read["ts"] and read["ts"] + read["dur"] <= s["ts"] + s["dur"] + 1e-3
        ]
        assert len(around) == 1


def test_trace_is_written_where_the_block_fails_and_nothing_is_recorded_outside(tmp_path: Path) -> None:
    def fails() -> None:
        with specache_fx.trace(tmp_path / "trace.json"), tracing.span("before"):
            raise RuntimeError("broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        fails()
    with tracing.span("after"):
        pass
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["before"]


@pytest.mark.parametrize("path", ["missing/trace.json", "."])
def test_trace_needs_a_file_in_a_folder_that_exists(path: str, tmp_path: Path) -> None:
    def traces() -> None:
        with specache_fx.trace(tmp_path / path):
            raise AssertionError("the block ran")

    with pytest.raises(specache_fx.ConfigError, match="give a file in a folder that exists"):
        traces()


def test_stats_say_what_prefetching_took_and_what_was_waited_for(fresh_dynamo: None) -> None:
    model = build("plain", 1).eval()
    model.compile(backend="specache", options=OPTIONS)
    ids = torch.randint(1, 61, (1, 20), generator=torch.Generator().manual_seed(0))
    out = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    seen = specache_fx.stats(out.past_key_values)
    assert seen.prefetch_seconds > 0
    assert seen.waited_seconds >= 0
    assert seen.hidden_share is not None and 0 <= seen.hidden_share <= 1
