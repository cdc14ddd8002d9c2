"""`specache-fx experiment NAME --quick` from the command line to the files, all of them, with the suite model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.cases import nightly_unless
from typer.testing import CliRunner

from specache_fx.cli import app
from specache_fx.experiments import EXPERIMENTS, report
from specache_fx.experiments.figure5 import cells, method
from specache_fx.experiments.methods import FULL


def run(out: Path, *names: str, more: tuple[str, ...] = ()) -> Result:
    command = [
        "experiment",
        *names,
        "--quick",
        "--threads",
        "1",
        "--out",
        str(out),
        *more,
    ]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


def said(result: Result) -> str:
    return " ".join(result.output.split())


def is_peer(cell: dict[str, Any]) -> bool:
    """Whether a method needs what `make test` does not install: kvpress, or optimum-quanto."""
    name, options = cell["method"]["name"], dict(cell["method"]["options"])
    return name.startswith("press:") or options.get("backend") == "quanto"


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("names", nightly_unless(lambda names: names != "all", ["figure5 hits", "all"]))
def test_json_table_and_picture_and_the_numbers_of_their_cells(names: str, tmp_path: Path) -> None:
    """In one run, as `make experiments` has them: they share cells."""
    result = run(tmp_path, *names.split())
    assert result.exit_code == 0, result.output
    for name in EXPERIMENTS if names == "all" else names.split():
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        assert saved["seed"] == 0
        assert {"command", "device", "versions", "commit", "model_fingerprint", "seconds"} <= set(saved)
        there = [one for one in saved["cells"] if one["missing"] is None]
        assert all(one["seconds"] > 0 for one in there)
        assert all(is_peer(one["cell"]) for one in saved["cells"] if one not in there)
        assert (tmp_path / f"{name}.md").read_text().count("|") > 20
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    _, scale, results, _ = report.read(tmp_path / "figure5.json")
    assert scale.quick
    full, low, more = (results.over(scale, one) for one in (FULL, method(0), method(64)))
    assert full is not None and low is not None and more is not None
    assert full.ratio == 1
    assert low.ratio < more.ratio < 1
    assert full.score == 100
    assert more.stat("topk_hit_rate") is not None and low.stat("topk_hit_rate") is None
    _, scale, results, _ = report.read(tmp_path / "hits.json")
    record = next(results[cell] for cell in report.load("hits").cells(scale) if cell.is_probe)
    # 24 tokens: a step for each but the first.
    assert [len(one["topk_hit_rate"]) for one in record.stats["series"]] == [23, 23]


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_dynamo")
def test_again_runs_nothing_and_another_dtype_all(tmp_path: Path) -> None:
    assert run(tmp_path, "figure5").exit_code == 0
    before = (tmp_path / "cells.jsonl").read_text()
    again = run(tmp_path, "figure5")
    assert "4 of 4 cells are there already" in said(again)
    assert (tmp_path / "cells.jsonl").read_text() == before
    other = run(tmp_path, "figure5", more=("--dtype", "float32"))
    assert "what differs, and in how many: dtype (4)" in said(other)
    _, scale, _, saved = report.read(tmp_path / "figure5.json")
    assert saved["dtype"] == "float32"
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == len(before.splitlines()) + len(
        cells(scale)
    )
