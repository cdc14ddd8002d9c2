"""`specache-bench eval` and `experiment`, run as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specache_bench.cli import app
from specache_bench.experiments import EXPERIMENTS
from specache_bench.experiments.base import paper_method, read


def run(*args: object) -> Result:
    environment = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    return CliRunner().invoke(app, [*map(str, args)], env=environment)


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.usefixtures("fresh_dynamo", "shallow")
def test_every_method_runs_on_every_task_length_and_depth(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    tasks = "--task single,depth=0.5 --task multikey,num_keys=6,depth=0.5 --length 300 --length 400"
    where = tasks.split()
    what = ["--method", "full", "--method", "kivi", "--bits", 2, "--prompts", 2, "--seed", 5, "--threads", 1]
    result = run("eval", *where, *what, "--records", records)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    jobs = {
        (j["workload"]["task"], j["workload"]["length"], j["method"]["name"])
        for j in (x["job"] for x in lines)
    }
    assert jobs == {(t, n, m) for t in ("single", "multikey") for n in (300, 400) for m in ("full", "kivi")}
    for line in lines:
        found, made = line["result"], line["provenance"]
        assert line["job"]["workload"]["depth"] == 0.5
        assert found["score"] == sum(found["scores"]) / 2 and len(found["predictions"]) == 2
        assert found["ratio"] == found["device_bytes"] / found["full_bytes"]
        assert (found["ratio"] == 1) == (line["job"]["method"]["name"] == "full")
        assert made["command"].startswith("specache-bench") and made["device"]["threads"] == 1
        assert {"python", "torch", "transformers", "specache-fx"} <= set(made["versions"])
    shown = [line.split() for line in result.output.splitlines() if line.split()[:1] == ["single,"]]
    assert shown[0][:6] == ["single,", "300", "tokens", "full", "1.000", shown[0][5]]
    again = run("eval", *where, *what, "--records", records)
    assert again.exit_code == 0 and len(records.read_text().splitlines()) == len(lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Give either --task NAME or --text FILE"),
        (["--task", "single", "--text", "x"], "Give either --task NAME or --text FILE"),
        (["--text", "/nowhere"], "can't be read as UTF-8 text"),
        (["--task", "nothing"], "There is no task 'nothing'"),
        (["--task", "single", "--method", "nothing"], "There is no method 'nothing'. Methods: full, roomy"),
        (["--task", "single", "--bits", 3], "bits=3 is not valid"),
        (["--task", "single", "--method", "full", "--bits", 1], "--bits is for specache, kivi, quantized"),
        (["--task", "single,agnostic=True"], "has no question of its own"),
        (["--task", "single,depth=abc"], "Task 'single': depth=abc: give a number"),
        (["--task", "multikey,num_keys=x"], "Task 'multikey': num_keys=x: give a whole number"),
        (["--task", "data,file=3"], "Task 'data': file=3: give a text"),
        (["--task", "single", "--dtype", "int8"], "choose one of bfloat16, float16, float32"),
        (["--task", "single", "--records", "/nowhere/x.jsonl"], "a folder that exists"),
        (["--task", "single", "--model", "/nowhere"], "There is no folder /nowhere"),
        (["--task", "single", "--method", "press:h2o"], "give --method specache too, or the bytes"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(args: list[object], message: str) -> None:
    result = run("eval", *args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert message in said(result)


def test_page_is_of_a_checkout(tmp_path: Path) -> None:
    result = run("page", tmp_path)
    assert result.exit_code == 2 and "is no checkout: there is no" in said(result)


def test_help_loads_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from specache_bench.cli import app; sys.argv = ['specache-bench', 'eval', '--help']\n"
        "try: app()\nexcept SystemExit: assert 'torch' not in sys.modules"
    )
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stderr
    assert "Compare ways of keeping the KV cache" in done.stdout


@pytest.mark.nightly  # by day, tables and pictures are made of invented records, and jobs run and resume in `eval`
@pytest.mark.usefixtures("fresh_dynamo", "shallow")
def test_experiment_leaves_json_and_picture_says_its_table_and_goes_on(tmp_path: Path) -> None:
    command = ("experiment", "figure5", "--quick", "--seed", 1, "--threads", 1, "--out", tmp_path)
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "| k | KV size |" in result.output and result.output.count("|") > 20
    assert (tmp_path / "figure5.png").read_bytes()[:4] == b"\x89PNG"
    results, saved = read(tmp_path / "figure5.json")
    assert {"command", "device", "versions", "commit", "model_fingerprint", "seconds", "seed"} <= set(saved)
    assert results.scale.quick
    full, low, more = (
        results.over(paper_method(one))
        for one in ("full", "kivi,bits=1,group_size=32,residual_length=64", "specache,bits=1,group_size=32")
    )
    assert full is not None and low is not None and more is not None
    assert full.ratio == 1 and low.ratio < more.ratio < 1 and full.score == 100
    assert more.stat("topk_hit_rate") is not None and low.stat("topk_hit_rate") is None
    before = (tmp_path / "records.jsonl").read_text()
    assert "4 of 4 jobs are there already" in said(run(*command))
    assert (tmp_path / "records.jsonl").read_text() == before


def test_experiments_are_listed_and_unknown_ones_refused() -> None:
    listed = run("experiment", "list")
    assert listed.exit_code == 0
    assert all(f"{name}: {made.summary}" in said(listed) for name, made in EXPERIMENTS.items())
    result = run("experiment", "table9")
    assert result.exit_code == 2
    assert "There is no experiment 'table9': choose from table1, table2" in said(result)
