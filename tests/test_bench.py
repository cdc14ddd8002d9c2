"""`specache-fx bench`: what its numbers are of, and what it says to bad input. Not how fast anything is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from specache_fx.bench.decode import ModelSize, bench_decode, methods, tensor_bytes
from specache_fx.bench.overlap import hidden_share, parts_of
from specache_fx.bench.report import attention_table, decode_tables
from specache_fx.cli import app
from specache_fx.runtime.tracing import Span

CPU = torch.device("cpu")


def span(name: str, start: float, stop: float) -> Span:
    return Span(name, "track", 0, start, stop, {})


def test_share_of_copies_that_nobody_waited_for_is_read_off_a_trace() -> None:
    copies = [span("prefetch", 0, 4), span("prefetch", 10, 14)]
    assert hidden_share([]) is None
    assert hidden_share(copies) == 1
    assert hidden_share([*copies, span("wait for prefetch", 4, 9), span("attention", 0, 4)]) == 1
    assert hidden_share([*copies, span("wait for prefetch", 3, 11)]) == 1 - 2 / 8
    assert hidden_share([*copies, span("wait for prefetch", 0, 14)]) == 0


def test_copy_with_nothing_to_compute_beside_it_is_waited_for_from_its_start() -> None:
    spans = [span("attention", 0, 1), span("start prefetch", 1, 2), span("prefetch", 1.5, 3.5)]
    assert hidden_share([*spans, span("wait for prefetch", 3, 4)]) == 0
    assert hidden_share([*spans, span("attention", 2, 3), span("wait for prefetch", 3, 4)]) == 0.75


def test_tables_of_the_committed_runs_show_every_digit_in_80_columns() -> None:
    results = Path(__file__).resolve().parent.parent / "results"
    (attention,) = json.loads((results / "bench_attention.json").read_text())["results"]
    tables = [attention_table(attention, "sdpa float32")]
    for decode in json.loads((results / "bench_decode.json").read_text())["results"]:
        tables += decode_tables(decode, "transformers")
    console = Console(width=80, file=io.StringIO())
    for table in tables:
        console.print(table)
    assert isinstance(console.file, io.StringIO) and "…" not in console.file.getvalue()


@pytest.mark.usefixtures("fresh_dynamo")
def test_decode_steps_of_all_kinds_are_timed_and_traced(tmp_path: Path) -> None:
    size = ModelSize(layers=2, hidden=32, intermediate=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab=32)
    known = methods([2], lowering="eager")
    chosen = {name: known[name] for name in ("transformers", "kivi 2-bit", "specache 2-bit")}
    trace = tmp_path / "trace.json"
    result = bench_decode(
        size,
        batch=2,
        kv_len=300,
        chosen=chosen,
        dtype=torch.float32,
        rounds=2,
        steps=3,
        device=CPU,
        trace=trace,
    )
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == list(chosen)
    assert all(
        row["median_ms"] > 0 and row["tokens_per_s"] > 0 and row["floor_ms"] > 0 for row in rows.values()
    )
    # Prompt, four steps to warm up and 2 x 3 that were timed, and whatever a cache adds to make room.
    assert rows["transformers"]["device_bytes"] == 2 * 2 * 2 * 2 * 8 * 4 * 310
    assert rows["kivi 2-bit"]["device_bytes"] < rows["transformers"]["device_bytes"]
    assert rows["kivi 2-bit"]["hidden_in_trace"] is None
    assert 0 <= rows["specache 2-bit"]["hidden_in_trace"] <= 1
    assert rows["specache 2-bit"]["moved_bytes_per_step"] > 0
    assert all(row["operator_calls"] > 10 * size.layers for row in rows.values())
    for name, row in rows.items():
        parts = row["parts_ms"]
        assert (parts is not None) == (chosen[name].kind == "specache")
        if parts is not None:  # all but the first are within it
            assert 0 < parts["attention"] < parts["decode step"]
            assert sum(parts.values()) < 2 * parts["decode step"]
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names.count("decode step") == 8
    assert names.count("prefetch") == names.count("attention") == 8 * size.layers


def test_attention_is_timed_beside_what_others_offer(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    command = ["bench", "attention", "--kv-len", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    done = CliRunner().invoke(app, [*command, "--rounds", "2", "--device", "cpu", "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["command"].startswith("specache-fx") and {"commit", "device", "versions"} < report.keys()
    (result,) = report["results"]
    names = [row["name"] for row in result["rows"]]
    ours = {f"specache {bits}-bit{codes}" for bits in (1, 2) for codes in ("", ", kivi")}
    assert {"sdpa float32", *ours} <= set(names)
    assert result["shape"]["kv_len"] == 256


def test_int8_weights_take_a_byte_an_element() -> None:
    size = ModelSize(
        1, hidden=64, intermediate=96, num_heads=2, num_kv_heads=1, head_dim=64, vocab=16, int8=True
    )
    model = size.build(torch.float32, CPU)
    linear = 64 * (2 * 128 + 2 * 64 + 3 * 96 + 16)
    others = model.get_input_embeddings().weight.nbytes + 3 * 64 * 4  # norms
    assert linear < sum(map(tensor_bytes, model.parameters())) - others < 1.2 * linear  # with a scale a row


def test_a_part_of_a_step_is_that_of_the_median_step() -> None:
    spans = [span("decode step", 0, 1), span("decode step", 2, 3), span("decode step", 4, 14)]
    spans += [span("attention", 0.1, 0.35), span("attention", 0.5, 0.75), span("attention", 2.1, 2.35)]
    spans += [span("attention", 5, 13), span("attention", 20, 25)]
    found = parts_of(spans)
    assert found is not None
    assert found["decode step"] == pytest.approx(1000) and found["attention"] == pytest.approx(500)
    assert parts_of([span("attention", 0, 1)]) is None


def test_decode_writes_where_its_numbers_come_from(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    sizes = "--layers 1 --hidden 32 --intermediate 16 --heads 2 --kv-heads 1 --head-dim 64 --vocab 16"
    command = [
        "bench",
        "decode",
        *sizes.split(),
        "--context",
        "130",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--bits",
        "2",
    ]
    done = CliRunner().invoke(app, [*command, "--device", "cpu", "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["command"].startswith("specache-fx") and {"commit", "device", "versions"} < report.keys()
    assert report["settings"]["methods"]["kivi 2-bit"] == {
        "kind": "specache",
        "policy": "kivi",
        "bits": 2,
        "lowering": "inductor",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["attention", "--heads", "3", "--kv-heads", "2"], "is no multiple of"),
        (["decode", "--bits", "3"], "choose one of"),
        (["decode", "--dtype", "int8"], "choose one of"),
        (["decode", "--int8", "--peers"], "--int8 has no --peers"),
        (["decode", "--trace", "missing/trace.json"], "give a file in a folder that exists"),
        (["decode", "--json", "missing/file.json"], "give a file in a folder that exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_named(options: list[str], message: str) -> None:
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["bench", *options])
    assert done.exit_code == 2
    assert message in done.output
