"""kvpress in an environment of its own: the worker, and what is said where there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Bench, Method
from specache_fx.eval.methods.press import PRESSES
from specache_fx.eval.peers import VARIABLE, find_python
from specache_fx.eval.tasks import make_samples
from specache_fx.eval.text import read_windows
from specache_fx.examples.needle import make_prompts
from specache_fx.worker_process import WorkerError

with_peers = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with kvpress (make peers)"
)
TOKEN = 2 * 2 * 2 * 64 * 4  # bytes of a token: layers, heads, keys and values, channels, float32


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench("needle", dtype="float32") as bench:
        yield bench


@with_peers
@pytest.mark.slow
@pytest.mark.parametrize("press", PRESSES)
def test_press_that_evicts_nothing_says_what_the_full_cache_says(press: str, bench: Bench) -> None:
    asked = make_samples("multikey", bench, num_prompts=3, length=400, seed=0)
    full = bench.run(Method.of("full"), asked)
    kept = bench.run(Method.of(press, ratio=0.0), asked)
    assert kept.predictions == full.predictions
    assert kept.device_bytes == full.device_bytes == kept.full_bytes


@with_peers
@pytest.mark.slow
@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("budget", [100 * TOKEN, 150 * TOKEN + 1, 10**9])
def test_press_gets_the_bytes_it_is_given_or_a_token_more(press: str, budget: int, bench: Bench) -> None:
    asked = make_samples("multikey", bench, num_prompts=2, length=400, seed=0)
    outcome = bench.run(Method.of(press, bytes=budget), asked)
    whole = 399 * TOKEN
    assert outcome.full_bytes == whole
    # PyramidKV gives each layer another number, rounded for each.
    assert min(budget, whole) <= outcome.device_bytes < min(budget, whole) + 3 * TOKEN
    assert outcome.stats["kept_tokens"] == pytest.approx(outcome.device_bytes / TOKEN - 3)


@with_peers
@pytest.mark.slow
def test_streaming_loses_what_lies_in_the_middle_and_keeps_what_is_new(bench: Bench) -> None:
    score = {
        depth: bench.run(
            Method.of("press:streaming", ratio=0.5),
            make_samples("single", bench, num_prompts=4, length=400, seed=0, depth=depth),
        ).score
        for depth in (0.3, 0.9)
    }
    assert score == {0.3: 0, 0.9: 1}


@with_peers
@pytest.mark.slow
def test_perplexity_of_a_press_that_evicts_nothing_is_the_full_caches(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(make_prompts(3, 298, 20, seed=2).texts))
    windows = read_windows(bench.tokenizer, file, 200, 3, seed=0)
    full = bench.perplexity(Method.of("full"), windows, decoded=10)
    press = bench.perplexity(Method.of("press:knorm", ratio=0.0), windows, decoded=10)
    assert press.perplexity == pytest.approx(full.perplexity, rel=1e-4)
    assert press.device_bytes == full.device_bytes


def test_missing_environment_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"/nowhere is no file\. Make it with `make peers`"):
        find_python("/nowhere")
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    with pytest.raises(ConfigError, match="/elsewhere is no file"):
        find_python(None)
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert find_python(None) == sys.executable


def test_environment_of_this_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".venv-peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert find_python(None) == str(python)


@with_peers
@pytest.mark.slow
def test_worker_tells_what_failed_and_goes_on(bench: Bench) -> None:
    short, long = (make_samples("single", bench, num_prompts=1, length=n, seed=0) for n in (40, 200))
    with pytest.raises(
        WorkerError, match="AssertionError: Query length 36 should be greater than the window"
    ):
        bench.run(Method.of("press:snapkv", ratio=0.5), short)
    assert bench.run(Method.of("press:snapkv", ratio=0.0), long).score == 1


def test_environment_without_kvpress_is_named(bench: Bench) -> None:
    asked = make_samples("multikey", bench, num_prompts=1, length=200, seed=0)
    with (
        Bench("needle", dtype="float32", peers_python=sys.executable) as other,
        pytest.raises(WorkerError, match=r"has no kvpress: `make peers` makes one that has"),
    ):
        other.run(Method.of("press:snapkv", ratio=0.5), asked)


def test_worker_that_does_not_start_is_named(bench: Bench, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no Python here >&2\nexit 1\n")
    python.chmod(0o755)
    asked = make_samples("multikey", bench, num_prompts=1, length=200, seed=0)
    with (
        Bench("needle", dtype="float32", peers_python=str(python)) as other,
        pytest.raises(WorkerError, match=r"worker ended \(no Python here\)\. `make peers` makes"),
    ):
        other.run(Method.of("press:snapkv", ratio=0.5), asked)
