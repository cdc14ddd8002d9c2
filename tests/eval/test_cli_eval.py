"""`specache-fx eval`, run as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specache_fx.cli import app
from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Method
from specache_fx.eval.request import read_methods, read_spelling
from specache_fx.examples.needle import make_prompts


def run(*args: object) -> Result:
    environment = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    return CliRunner().invoke(app, ["eval", *map(str, args)], env=environment)


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def evaluated(tmp_path: Path, *args: object) -> dict[str, Any]:
    file = tmp_path / "eval.json"
    result = run(*args, "--json", file)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.usefixtures("fresh_dynamo")
def test_every_method_runs_on_every_task_length_and_depth(tmp_path: Path) -> None:
    where = ["--task", "single", "--task", "multikey,records=20", "--length", 300, "--length", 400]
    what = [
        "--method",
        "full",
        "--method",
        "kivi",
        "--bits",
        2,
        "--prompts",
        2,
        "--depth",
        0.5,
        "--threads",
        1,
    ]
    report = evaluated(tmp_path, *where, *what)
    assert [(row["task"], row["length"], row["method"]) for row in report["rows"]] == [
        (task, length, method)
        for task in ("single", "multikey,records=20")
        for length in (300, 400)
        for method in ("full", "kivi")
    ]
    for row in report["rows"]:
        assert row["depth"] == 0.5
        assert len(row["scores"]) == len(row["predictions"]) == 2
        assert row["score"] == sum(row["scores"]) / 2
        assert row["ratio"] == row["device_bytes"] / row["full_bytes"]
    full, kivi = report["rows"][:2]
    assert full["score"] == full["ratio"] == 1
    assert full["exact_hit_rate"] is full["topk_hit_rate"] is None
    assert kivi["options"] == {"bits": 2}
    assert kivi["device_bytes"] < full["device_bytes"]
    assert kivi["host_bytes"] == 0
    assert report["settings"] | {"model": "needle", "prompts": 2, "seed": 0} == report["settings"]
    assert report["device"]["type"] == "cpu"
    assert report["device"]["threads"] == 1
    assert report["device"]["name"]
    assert {"python", "torch", "transformers", "specache-fx"} <= set(report["versions"])
    assert "commit" in report
    assert report["command"].startswith("specache-fx")


def test_text_gives_perplexity(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(make_prompts(4, 298, 20, seed=2).texts))
    report = evaluated(
        tmp_path,
        *("--text", text, "--length", 200, "--prompts", 3, "--method", "full"),
        *("--method", "quantized,backend=fp8", "--decoded", 5),
    )
    full, fp8 = report["rows"]
    assert full["task"] == "text.txt"
    assert full["tokens"] == 15
    assert 1 < full["perplexity"] != fp8["perplexity"]
    assert "score" not in full
    assert full["kl"] == 0 < fp8["kl"]
    assert full["same_top"] == 1
    assert [len(row) for row in fp8["kl_at"]] == [len(row) for row in fp8["loss_at"]] == [5, 5, 5]
    assert report["settings"]["decoded"] == 5


def test_text_is_gone_on_with(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(make_prompts(4, 298, 20, seed=2).texts))
    report = evaluated(
        tmp_path,
        *("--text", text, "--length", 200, "--length", 240, "--prompts", 2, "--generate", 12),
        *("--temperature", 1, "--method", "full", "--method", "quantized,backend=fp8"),
    )
    assert [(row["length"], row["method"]) for row in report["rows"]] == [
        (length, method) for length in (200, 240) for method in ("full", "quantized")
    ]
    full = report["rows"][0]
    assert full["agreement"] == full["until_difference"] == 1
    assert [len(row) for row in full["ids"]] == [12, 12]
    assert report["settings"] | {"generate": 12, "temperature": 1.0} == report["settings"]


def test_table_shows_what_was_measured() -> None:
    result = run("--task", "single", "--length", 200, "--prompts", 1, "--method", "full")
    assert result.exit_code == 0, result.output
    line = next(line.split() for line in result.output.splitlines() if line.split()[:1] == ["single"])
    assert line[:5] == ["single", "200", "full", "1.000", "199.0"]
    assert line[6:10] == ["1.00x", "-", "-", "-"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Give either --task NAME or --text FILE"),
        (["--task", "single", "--text", "x"], "Give either --task NAME or --text FILE"),
        (["--task", "single", "--decoded", 3], "--decoded: not with --task"),
        (["--text", "x", "--chat", "--depth", 0.5], "--chat, --depth: not with --text"),
        (["--task", "single", "--generate", 3], "--generate: not with --task"),
        (["--text", "x", "--generate", 3, "--decoded", 3], "--decoded: not with --generate"),
        (["--text", "x", "--temperature", 1], "--temperature: only with --generate"),
        (["--text", "/nowhere"], "can't be read as UTF-8 text"),
        (["--task", "nothing"], "There is no task 'nothing'. Tasks: single, multikey"),
        (
            ["--task", "single", "--method", "nothing"],
            "There is no method 'nothing'. Methods: full, specache",
        ),
        (["--task", "single", "--bits", 3], "bits=3 is not valid"),
        (["--task", "single", "--method", "full", "--bits", 1], "--bits is for specache, kivi, quantized"),
        (["--task", "single", "--method", "full", "--lowering", "eager"], "--lowering is for specache"),
        (["--task", "single", "--length", 20000], "holds 16,384 tokens"),
        (["--task", "single,seed=3"], "seed has an option of its own"),
        (["--task", "single", "--dtype", "int8"], "choose one of bfloat16, float16, float32"),
        (["--task", "single", "--json", "/nowhere/x.json"], "a folder that exists"),
        (["--task", "single", "--model", "/nowhere"], "There is no folder /nowhere"),
        (["--task", "ruler/vt"], "needs its data"),
        (
            ["--task", "single", "--method", "press:h2o,bytes=9", "--peers", "/no"],
            "Make it with `make peers`",
        ),
        (["--task", "single", "--method", "press:h2o"], "give --method specache too, or the bytes"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(args: list[object], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert message in said(result)


def test_help_loads_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from specache_fx.cli import app; sys.argv = ['specache-fx', 'eval', '--help']\n"
        "try: app()\nexcept SystemExit: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Compare ways of keeping the KV cache" in done.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", ("full", {})),
        ("specache,bits=1,top_k=32", ("specache", {"bits": 1, "top_k": 32})),
        ("press:h2o, ratio=0.5", ("press:h2o", {"ratio": 0.5})),
        ("specache,strict=true,host=disk,x=None", ("specache", {"strict": True, "host": "disk", "x": None})),
    ],
)
def test_spelling_is_read(text: str, expected: tuple[str, dict[str, Any]]) -> None:
    assert read_spelling(text) == expected


@pytest.mark.parametrize("text", ["full,bits", "full,=1", "full,bits=1,bits=2"])
def test_bad_spelling_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no option|given twice"):
        read_spelling(text)


def test_widths_go_to_those_that_have_none_and_presses_come_last() -> None:
    methods = read_methods(
        ["press:snapkv", "full", "specache", "kivi,bits=4", "press:tova,ratio=0.5"], [1, 2], "eager"
    )
    assert methods == [
        Method.of("full"),
        Method.of("specache", bits=1, lowering="eager"),
        Method.of("specache", bits=2, lowering="eager"),
        Method.of("kivi", bits=4, lowering="eager"),
        Method.of("press:tova", ratio=0.5),
        Method.of("press:snapkv"),
    ]
    with pytest.raises(ConfigError, match="full is given twice"):
        read_methods(["full", "full"], [], None)
