"""`python -m specache_bench.gpu` with tiny shapes, on any machine: every stage runs, and none can spoil another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.triton_mode import DEVICE, needs_triton

from specache_bench import gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))


def run(out: Path, *options: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "specache_bench.gpu", "--quick", "--out", str(out), *options]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_stages_are_processes_and_say_what_they_found(tmp_path):
    out = tmp_path / "gpu.json"
    gpu.main(out, only=["environment"], quick=True)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    stages = json.loads(out.read_text())["stages"]
    assert list(stages) == ["environment"] and stages["environment"]["device_gb_s"] > 0


@pytest.mark.nightly
def test_every_stage_runs_with_tiny_shapes(tmp_path):
    record = run(tmp_path / "gpu.json", "--most", "300", "--minutes", "40")
    assert list(record["stages"]) == list(gpu.STAGES)
    text = json.dumps(record)
    assert '"error"' not in text and '"ok": false' not in text
    stages = record["stages"]
    assert {"transformers", "kivi-2", "specache-2", "specache-1"} <= set(stages["latency"])
    assert "8192 x 8" in stages["batches"] or "200 x 2" in stages["batches"]
    assert stages["profile"]["specache-2"]["launches_a_step"] > 0
    assert stages["tests"]["ok"]


@needs_triton
@pytest.mark.nightly
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels are compiled here, and measured by themselves")
def test_attention_kernel_is_checked_in_the_interpreter(tmp_path):
    stages = run(tmp_path / "gpu.json", "--only", "attention", TRITON_INTERPRET="1")["stages"]
    assert stages["attention"]["timed"]["kernel"] == "triton"
    assert all(
        stages["attention"][f"{bits} bit, {name}"]["ok"]
        for bits in (1, 2, 4, 8)
        for name in ("kivi", "turboquant")
    )


def test_stage_without_time_is_ended_and_recorded(tmp_path):
    found = gpu.run_stage("environment", 0.2, True, tmp_path / "gpu.json")
    assert found["error"] == "it was ended after 0.2 s"
    assert gpu.run_stage("environment", 0, True, tmp_path / "gpu.json") == {"skipped": "no time was left"}


def test_stage_that_fails_says_how(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    found = gpu.run_stage("environment", 60, True, tmp_path / "gpu.json")
    assert found["error"] == "it ended with 3: out of memory\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_run_or_written(tmp_path):
    with pytest.raises(typer.BadParameter, match="There is no CUDA device: --quick"):
        gpu.main(tmp_path / "gpu.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given", [{"only": ["speed"]}, {"stage": "speed"}], ids=lambda given: next(iter(given))
)
def test_unknown_stages_are_named(tmp_path, given):
    with pytest.raises(typer.BadParameter, match="speed: the stages are environment, captures, tests"):
        gpu.main(tmp_path / "gpu.json", **given)
    assert not list(tmp_path.iterdir())
