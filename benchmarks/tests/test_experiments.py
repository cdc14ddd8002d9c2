"""Every experiment's table and picture from invented records, and the pages from the committed ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.invented import invented

from specache_bench import pages
from specache_bench.experiments import EXPERIMENTS
from specache_bench.experiments.base import Results, Scale, read, render, write
from specache_bench.records import Record
from specache_bench.runner import ordered
from specache_fx.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("multikey", "multiquery", "tracking", "copying")
FULL = Scale("suite", TASKS, 4096, 24, 0)
QUICK = Scale("suite", TASKS[:1], 512, 2, 0, quick=True)
EACH = pytest.mark.parametrize("name", EXPERIMENTS)
ORIGIN = {
    "command": "specache-bench experiment table5",
    "model": "suite",
    "model_fingerprint": "0123456789abcdef",
    "dtype": "bfloat16",
    "device": {"type": "cpu", "name": "AMD EPYC", "cores": 2, "threads": 2},
    "peers": None,
    "versions": {"torch": "2.13.0"},
    "commit": "0" * 40,
    "seed": 0,
    "date": "2026-01-01",
}


def made(name: str, scale: Scale, **missing: str) -> Results:
    record: dict[str, Any] = {"record": Record(missing="not here")} if missing else {}
    jobs = EXPERIMENTS[name].jobs(scale)
    return Results(scale, {job.key: record.get("record") or invented(job) for job in jobs})


@EACH
@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_tables_are_whole(name: str, scale: Scale) -> None:
    assert EXPERIMENTS[name].name == name
    table = EXPERIMENTS[name].table(made(name, scale))
    assert table.rows and {len(row) for row in table.rows} == {len(table.headers)}
    assert all(cell.strip() or column for row in table.rows for column, cell in enumerate(row))
    assert "None" not in table.markdown() and "nan" not in table.markdown()


@EACH
def test_missing_jobs_are_dashes_and_no_error(name: str, tmp_path: Path) -> None:
    missing = made(name, FULL, every="one")
    assert all("-" in row for row in EXPERIMENTS[name].table(missing).rows)
    render(EXPERIMENTS[name], missing, tmp_path)


@EACH
def test_what_is_written_reads_back(name: str, tmp_path: Path) -> None:
    experiment, scale = EXPERIMENTS[name], QUICK
    records = {job.key: invented(job) for job in experiment.jobs(scale)}
    table = write(experiment, scale, records, ORIGIN, tmp_path)
    results, saved = read(tmp_path / f"{name}.json")
    assert results.scale == scale and saved["model"] == "suite"
    assert experiment.table(results) == table
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_experiments_share_their_jobs() -> None:
    every = [job for experiment in EXPERIMENTS.values() for job in experiment.jobs(FULL)]
    order = ordered(every, 1_000_000)
    assert len(order) < 0.85 * len(every)
    # Equal settings written in another order would run twice.
    sets = [(job.workload, job.match, job.method.name, frozenset(job.method.options)) for job in order]
    assert len(set(sets)) == len(sets)


def test_committed_pages_show_the_committed_results(tmp_path: Path) -> None:
    names = ("README.md", *(f"docs/{name}.md" for name in ("results", "real_models", "performance")))
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "results").symlink_to(ROOT / "results")
    pages.renew_all(tmp_path)
    for name in names:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name}: run `make page`"


def test_block_has_table_picture_reasons_and_provenance(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["table5"]
    records = {job.key: invented(job) for job in experiment.jobs(FULL)}
    records[experiment.jobs(FULL)[0].key] = Record(missing="no such quantiser")
    write(experiment, FULL, records, ORIGIN, tmp_path / "results")
    block = pages.block(tmp_path / "docs" / "results.md", tmp_path / "results", "table5")
    assert "](../results/table5.png)" in block
    assert re.search(r"\| original \(eq\. 2\) \| KIVI \| - \| - .*\| 3\.7 \| 4\.9 \| 20\.3 \|", block)
    assert re.search(r"^- kivi bits=1 .*: no such quantiser$", block, re.MULTILINE)
    assert (
        "experiment table5`: model suite (0123456789abcdef), bfloat16, seed 0, AMD EPYC (2 of 2 cores)"
        in block
    )
    file = tmp_path / "results" / "table5.json"
    gpu = json.loads(file.read_text()) | {"device": {"type": "cuda", "name": "NVIDIA H200"}}
    file.write_text(json.dumps(gpu))
    assert "seed 0, NVIDIA H200, " in pages.block(tmp_path / "docs" / "results.md", file.parent, "table5")
    assert pages.block(tmp_path / "docs" / "results.md", tmp_path, "table1").startswith("Not run yet")


def test_renewing_leaves_prose_alone() -> None:
    text = "# Results\nBefore.\n<!-- a: begin -->\nold\n<!-- a: end -->\nAfter \\1.\n"
    renewed = pages.renew(text, {"a": r"new \1"})
    assert renewed == "# Results\nBefore.\n<!-- a: begin -->\n\nnew \\1\n\n<!-- a: end -->\nAfter \\1.\n"
    assert pages.renew(renewed, {"a": r"new \1"}) == renewed
    for bad in ("", "<!-- a: begin -->", "<!-- a: end --><!-- a: begin -->", "<!-- a: begin -->" * 2):
        with pytest.raises(ConfigError, match=r"needs '<!-- a: begin -->' and '<!-- a: end -->'"):
            pages.renew(bad, {"a": "new"})


def test_reports_of_before_the_laboratory_are_read() -> None:
    """Their jobs had `prompts` where a workload is now."""
    saved = json.loads((ROOT / "results" / "table1.json").read_text())
    assert "prompts" in saved["cells"][0]["cell"]
    results, _ = read(ROOT / "results" / "table1.json")
    assert {len(results[job].scores) for job in EXPERIMENTS["table1"].jobs(results.scale)} == {24}
