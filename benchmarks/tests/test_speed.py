"""`specache-bench decode` and `attention`: what their numbers are of. Not how fast anything is."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from specache_bench import speed
from specache_bench.cli import app
from specache_bench.methods import plain_tensors
from specache_bench.records import Method
from specache_bench.report import attention_table, decode_tables
from specache_bench.speed import ModelSize, speed_methods
from specache_bench.timing import parts_of
from specache_fx.runtime.tracing import Span

CPU = torch.device("cpu")
OURS = ("kivi 2-bit", "kcache", "specache 2-bit", "specache 2-bit, token")
RESULTS = Path(__file__).resolve().parents[2] / "results"


def span(name: str, start: float, stop: float) -> Span:
    return Span(name, "track", 0, start, stop, {})


def test_tables_of_the_committed_runs_show_every_digit_in_80_columns() -> None:
    (attention,) = json.loads((RESULTS / "bench_attention.json").read_text())["results"]
    tables = [attention_table(attention)]
    for name in ("bench_decode", "peers_float32", "peers_batches", "int8"):
        for decode in json.loads((RESULTS / f"{name}.json").read_text())["results"]:
            tables += decode_tables(decode)
    console = Console(width=80, file=io.StringIO())
    console.print(*tables)
    assert isinstance(console.file, io.StringIO) and "…" not in console.file.getvalue()


@pytest.mark.usefixtures("fresh_dynamo")
def test_decode_steps_of_all_kinds_are_timed_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "speed_methods", partial(speed_methods, lowering="eager"))
    file, trace = tmp_path / "decode.json", tmp_path / "trace.json"
    size = "small,layers=1,hidden=32,intermediate=48,num_heads=4,num_kv_heads=2,head_dim=8,vocab=32"
    command = ["decode", "--size", size, "--batch", "2", "--context", "300", "--rounds", "2", "--steps", "3"]
    # hqq's layers have no keys of their own right after a prompt.
    command += ["--bits", "2", "--method", "roomy", "--method", "quantized,backend=hqq,bits=2,group_size=8"]
    command += ["--device", "cpu", "--busy", "1"]
    done = CliRunner().invoke(app, [*command, "--json", str(file), "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["command"].startswith("specache-bench") and {"commit", "device", "versions"} < report.keys()
    kivi = {"method": "kivi", "bits": 2, "residual_length": 64, "lowering": "eager"}
    assert report["settings"]["methods"]["kivi 2-bit"] == kivi
    (result,) = report["results"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == list(report["settings"]["methods"]) and result["peers"] == {}
    assert {"transformers", "transformers, compiled", *OURS, "roomy"} <= rows.keys()
    assert all(min(row["median_ms"], row["tokens_per_s"], row["floor_ms"]) > 0 for row in rows.values())
    assert all(row["busy"]["1"]["median_ms"] > 0 and row["busy"]["1"]["calls"] == 6 for row in rows.values())
    # Prompt, four steps to warm up and 2 x 2 x 3 that were timed, and whatever a cache adds to make room.
    assert rows["transformers"]["device_bytes"] == 2 * 2 * 2 * 8 * 4 * 316
    assert rows["kivi 2-bit"]["device_bytes"] < rows["transformers"]["device_bytes"]
    assert 0 <= rows["specache 2-bit, token"]["hidden_share"] <= 1
    assert (
        rows["specache 2-bit, token"]["moved_bytes_per_step"]
        > 0
        == rows["specache 2-bit"]["moved_bytes_per_step"]
    )
    for name, row in rows.items():
        parts = row["parts_ms"]
        assert (parts is not None) == (name in OURS)
        if parts is not None:  # all but the first are within it
            assert 0 < parts["attention"] < parts["decode step"]
            assert sum(parts.values()) < 2 * parts["decode step"]
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names.count("decode step") == names.count("attention") == 8


def test_methods_are_lowered_by_inductor_unless_told_otherwise() -> None:
    chosen = speed_methods([2], ["specache,bits=1,lowering=eager", "kivi,bits=4", "roomy"])
    *_, built_in, two_lanes, told, more, other = chosen.items()
    assert two_lanes[1] == Method.of("specache", bits=2, lowering="inductor", lookahead="token")
    assert built_in == ("specache 2-bit", Method.of("specache", bits=2, lowering="inductor"))
    assert told == ("specache bits=1 lowering=eager", Method.of("specache", bits=1, lowering="eager"))
    assert more == ("kivi bits=4", Method.of("kivi", bits=4, lowering="inductor"))
    assert other == ("roomy", Method.of("roomy"))


def test_attention_is_timed_beside_what_others_offer(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    shape = "layer,num_heads=4,num_kv_heads=2,head_dim=16"
    command = ["attention", "--kv-len", "256", "--shape", shape, "--rounds", "2"]
    done = CliRunner().invoke(app, [*command, "--device", "cpu", "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["command"].startswith("specache-bench") and {"commit", "device", "versions"} < report.keys()
    (result,) = report["results"]
    names = [row["name"] for row in result["rows"]]
    ours = {f"specache {bits}-bit{codes}" for bits in (1, 2) for codes in ("", ", kivi")}
    assert {"sdpa float32", *ours} <= set(names)
    assert result["shape"]["kv_len"] == 256


def test_int8_weights_take_a_byte_an_element() -> None:
    size = ModelSize(1, 64, 96, 2, 1, 64, 16, int8=True)
    model = size.build(torch.float32, CPU)
    linear = 64 * (2 * 128 + 2 * 64 + 3 * 96 + 16)
    others = model.get_input_embeddings().weight.nbytes + 3 * 64 * 4  # norms
    held = sum(x.nbytes for x in plain_tensors(list(model.parameters())))
    assert linear < held - others < 1.2 * linear  # with a scale a row


def test_a_part_of_a_step_is_that_of_the_median_step() -> None:
    spans = [span("decode step", 0, 1), span("decode step", 2, 3), span("decode step", 4, 14)]
    spans += [span("attention", 0.1, 0.35), span("attention", 0.5, 0.75), span("attention", 2.1, 2.35)]
    spans += [span("attention", 5, 13), span("attention", 20, 25)]
    found = parts_of(spans)
    assert found is not None
    assert found["decode step"] == pytest.approx(1000) and found["attention"] == pytest.approx(500)
    assert parts_of([span("attention", 0, 1)]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["attention", "--shape", "layer,num_heads=3,num_kv_heads=2"], "is no multiple of"),
        (["decode", "--bits", "3"], "choose one of"),
        (["decode", "--dtype", "int8"], "choose one of"),
        (["decode", "--size", "small,int8=True", "--peers"], "int8=True has no peers"),
        (["decode", "--size", "small,width=3"], "has no option 'width'. Valid options: layers"),
        (["decode", "--size", "small,layers=x"], "layers=x: give a whole number"),
        (["decode", "--size", "small,num_kv_heads=0"], "num_kv_heads=0: give a whole number >= 1"),
        (["attention", "--shape", "layer,head_dim=x"], "head_dim=x: give a whole number"),
        (["decode", "--method", "openvino,kv=f16"], "choose one of u8, u4"),
        (["decode", "--trace", "missing/trace.json"], "give a file in a folder that exists"),
        (["decode", "--json", "missing/file.json"], "give a file in a folder that exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_named(options: list[str], message: str) -> None:
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, options)
    assert done.exit_code == 2
    assert message in done.output
