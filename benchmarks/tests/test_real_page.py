"""The pages on trained models have the figures of the committed results, and these hold what the default is for."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specache_bench import real_models as page
from specache_bench import starts
from specache_bench.cli import app
from specache_fx.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DEFAULT, TWO_LANES = "same step (default)", "recover"
PERFORMANCE = ROOT / "docs" / "performance.md"


def row_of(model: str, label: str, bits: int | None, mode: str, length: int) -> dict[str, Any]:
    row = page.find(page.read(ROOT / "results"), model, label, bits, mode, length)
    assert row is not None
    return row


def test_default_is_near_to_the_full_cache() -> None:
    for model, length in itertools.product(page.MODELS, (2048, 4096)):
        for bits, most in ((2, 0.005), (1, 0.015)):
            assert row_of(model, DEFAULT, bits, "forced", length)["kl"] <= most


def test_default_is_near_to_the_full_cache_on_texts_that_nothing_was_tuned_on() -> None:
    for model, text, length in itertools.product(page.MODELS, ("code", "json", "german"), (2048, 4096)):
        # The exception of docs/real_models.md.
        label = "half the shares" if (model, text, length) == ("smollm2", "german", 4096) else DEFAULT
        for bits, most in ((2, 0.005), (1, 0.015)):
            assert row_of(model, label, bits, text, length)["kl"] <= most
        assert row_of(model, label, 2, text, length)["kl_p99"] <= 0.1


def test_two_lanes_are_near_to_the_full_cache() -> None:
    for length, (bits, most) in itertools.product((2048, 4096), ((2, 0.015), (1, 0.06))):
        assert row_of("smollm2", TWO_LANES, bits, "forced", length)["kl"] <= most


@pytest.mark.parametrize(
    ("model", "label", "bits"), [("smollm2", "KIVI", 2), ("smollm2", "paper", 2), ("gemma3", TWO_LANES, 1)]
)
def test_losses_that_grow_with_the_context(model: str, label: str, bits: int) -> None:
    losses = [row_of(model, label, bits, "forced", length)["kl"] for length in (1024, 2048, 4096)]
    assert losses == sorted(losses)


def test_two_lanes_capture_more_attention_than_what_it_replaced() -> None:
    for model in page.MODELS:
        for mode in ("forced", "greedy", "sampled"):
            captured = [
                row_of(model, label, 2, mode, 2048)["stats"]["attention_hit_rate"]
                for label in (TWO_LANES, "keep", "query")
            ]
            assert captured[0] == max(captured)


def test_readme_says_what_becomes_of_a_table() -> None:
    readme = (ROOT / "README.md").read_text()
    columns = (("full cache", None), (DEFAULT, 2), ("KIVI", 2))
    for model, name in zip(page.MODELS, ("SmolLM2-135M", "Gemma 3 270M"), strict=True):
        rows = [row_of(model, label, bits, "table", 1500) for label, bits in columns]
        assert f"| {name} | {' | '.join(format(row['score'], '.3f') for row in rows)} |" in readme


def test_rows_that_are_added_leave_those_before_and_their_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLab:
        def __init__(self, model: str) -> None:
            self.model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)

        __enter__ = __exit__ = lambda self, *exc: self

    class NoWork:
        def run(self, lab: object, method: object) -> dict[str, Any]:
            return {"score": 0.5, "predictions": ["long"]}

    file = tmp_path / "real_smollm2.json"
    old = json.loads((ROOT / "results/real_smollm2.json").read_text())
    old["rows"] = [row for row in old["rows"] if row["label"] != "keep" or row["mode"] != "table"]
    file.write_text(json.dumps(old))
    monkeypatch.setattr(page, "Lab", NoLab)
    monkeypatch.setattr(page.Run, "workload", NoWork())
    page.measure("smollm2", file, print)
    new = json.loads(file.read_text())
    count = len(old["rows"])
    assert new["rows"][:count] == old["rows"] and new | {"rows": []} == old | {"rows": []}
    added = new["rows"][count:]
    assert [row["options"]["bits"] for row in added if row["label"] == "keep" and row["mode"] == "table"] == [
        2,
        1,
    ]
    for row in added:
        assert {"command", "device", "versions", "commit", "settings"} < row.keys()
        assert row["score"] == 0.5 and "predictions" not in row


def test_docs_say_how_long_the_calls_of_a_chat_take() -> None:
    report = json.loads((ROOT / "results/chat.json").read_text())
    calls = {(row["method"], row["start"], row["call"]): row for row in report["rows"]}
    first = "first prompt (512)"

    def told(name: str, start: str, call: str = first, method: str = "specache") -> str:
        value = calls[method, start, call][name]
        return f"{value:.{int(value < 10)}f} s"

    readme = " ".join((ROOT / "README.md").read_text().split())
    waits = [
        told(name, start)
        for start in ("later process", "empty caches")
        for name in ("first_token", "longest_wait")
    ]
    told_there = (
        "first token after {}, and the second {} later; from empty compiler caches after {}, and {} later."
    )
    assert told_there.format(*waits) in readme
    guide = " ".join((ROOT / "docs/guide.md").read_text().split())
    warm = calls["specache, warmed up", "later process", "warm_up"]["seconds"]
    assert f"That took {warm:.0f} s for batches of 1, 2 and 3 of SmolLM2" in guide


def test_misses_end_where_the_sequence_has_the_ngram() -> None:
    for model in page.MODELS:
        rows = json.loads((ROOT / f"results/real_{model}.json").read_text())["rows"]
        (row,) = (row for row in rows if row["mode"] == "misses")
        assert row["longest_run_with_ngram"] <= 3


def test_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho Traceback >&2\necho The model is not there. >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ConfigError, match=r"^saved_start smollm2 1 saves ended: The model is not there\.$"):
        starts.in_process(starts.saved_start, "smollm2", 1, "saves")


@pytest.mark.parametrize(
    "command",
    ["saved --model smollm2 --model gemma3"],
    ids=lambda command: command.split()[0],
)
def test_options_that_a_start_has_no_use_for_are_named(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["starts", *command.split(), "--out", str(tmp_path)])
    assert done.exit_code == 2 and "leave it out" in done.output


@pytest.mark.parametrize("command", [["starts", "saved"], ["real", "smollm2"]], ids="-".join)
def test_folder_of_results_is_asked_for_before_the_work(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--out", "/nowhere"])
    assert done.exit_code == 2 and "--out /nowhere: give a folder that exists" in done.output


def test_docs_say_how_long_a_saved_cache_takes_to_answer_which_is_a_tenth_of_reading() -> None:
    report = json.loads((ROOT / "results/saved.json").read_text())
    rows = {row["start"]: row for row in report["rows"]}
    reads, loads = (rows[start]["first_token_seconds"] for start in ("reads all", "loads, file in memory"))
    assert all(row["tokens_equal"] for row in rows.values()) and loads <= reads / 10
    assert rows["loads, file in memory"]["device_bytes"] == report["saved"]["device_bytes"]
    docs = " ".join(PERFORMANCE.read_text().split())
    size = f"{report['saved']['file_bytes'] / 2**20:.0f} MiB"
    assert f"first token after {loads:.1f} s from a saved cache of 4,096 tokens ({size})" in docs
    assert f"It does so after {reads:.1f} s where it reads them" in docs
    loading = rows["loads, file in memory"]["load_seconds"]
    assert f"Loading is {loading:.2f} s of the {loads:.2f}" in docs
