"""kvpress in an environment of its own: the worker, and the message where there is none."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specache_bench.lab import Lab
from specache_bench.methods import PRESSES
from specache_bench.records import Method
from specache_bench.workers import KVPRESS, WorkerError
from specache_bench.workloads import Prompts, Windows, answer
from specache_fx.errors import ConfigError

VARIABLE = "SPECACHE_PEERS"
with_peers = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with kvpress (make peers)"
)
FULL, PROMPTS = Method.of("full"), Prompts("multikey", 400, 2, 0)


@with_peers
@pytest.mark.slow
@pytest.mark.parametrize("press", PRESSES)
def test_press_that_evicts_nothing_says_what_the_full_cache_says(press: str, suite: Lab) -> None:
    full, kept = (PROMPTS.run(suite, method) for method in (FULL, Method.of(press, ratio=0.0)))
    assert kept["predictions"] == full["predictions"]
    assert kept["device_bytes"] == full["device_bytes"] == kept["full_bytes"]


@with_peers
@pytest.mark.slow
@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("share", [0.25, 0.4, 9.0])
def test_press_gets_the_bytes_it_is_given_or_a_token_more(press: str, share: float, suite: Lab) -> None:
    whole = PROMPTS.run(suite, FULL)["device_bytes"]
    budget = int(share * whole)
    found = PROMPTS.run(suite, Method.of(press, bytes=budget))
    assert found["full_bytes"] == whole
    # PyramidKV gives each layer another number, rounded for each.
    assert min(budget, whole) <= found["device_bytes"] < min(budget, whole) + 4 * whole / 400


@with_peers
@pytest.mark.slow
def test_press_that_sees_no_question_reads_it_afterwards(suite: Lab) -> None:
    words = [sample.prompt.split() for sample in PROMPTS.samples(suite)]
    asked = [
        replace(sample, context=" ".join(one[:-9]), question=" " + " ".join(one[-9:]))
        for sample, one in zip(PROMPTS.samples(suite), words, strict=True)
    ]
    full, kept = (
        answer(suite, method, asked, agnostic=True) for method in (FULL, Method.of("press:knorm", ratio=0.0))
    )
    assert kept["predictions"] == full["predictions"] and kept["full_bytes"] == full["full_bytes"]


@with_peers
@pytest.mark.slow
def test_perplexity_of_a_press_that_evicts_nothing_is_the_full_caches(suite: Lab, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(s.prompt.removeprefix("<bos>") for s in PROMPTS.samples(suite)))
    windows = Windows(str(file), 200, 3, 0, 10)
    full, press = (windows.run(suite, method) for method in (FULL, Method.of("press:knorm", ratio=0.0)))
    assert press["perplexity"] == pytest.approx(full["perplexity"], rel=1e-4)
    assert press["device_bytes"] == full["device_bytes"]
    assert press["kl"] == pytest.approx(0, abs=1e-6) and press["same_top"] == 1


def test_missing_environment_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    with pytest.raises(ConfigError, match=r"/elsewhere is no file\. Make it with `make peers`"):
        KVPRESS.python()
    monkeypatch.delenv(VARIABLE)
    python = tmp_path / ".venv-peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert KVPRESS.python() == str(python)


def test_environment_without_kvpress_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert KVPRESS.versions("torch", "kvpress") is None
    with (
        Lab("suite", dtype="float32") as lab,
        pytest.raises(WorkerError, match=r"has no kvpress: `make peers` makes one that has"),
    ):
        PROMPTS.run(lab, Method.of("press:snapkv", ratio=0.5))
