"""Data parallel: two Ray actors with a compiled model each answer as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from specache_fx.examples.needle import MODEL_DIR
from specache_fx.examples.ray_batch import Answer, needle_rows

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def python_with_ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with Ray, and all that this one has."""
    folder = tmp_path_factory.mktemp("ray")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    (site,) = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "ray[data]==2.60.0"], check=True)
    return python


def test_two_actors_answer_as_one_process(python_with_ray: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    run = [python_with_ray, "-m", "specache_fx.examples.ray_batch", answers, "--actors", "2"]
    done = subprocess.run(
        [*run, "--lowering", "eager"],
        env={**os.environ, "PYTHONPATH": "", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "32 prompts answered" in done.stdout
    lines = [line for path in answers.glob("*.json") for line in path.read_text().splitlines()]
    found = {row["prompt"]: row["answer"] for row in map(json.loads, lines)}
    rows = needle_rows(32)
    alone = Answer(str(MODEL_DIR), 4, {"bits": 2, "lowering": "eager"}, 0)
    prompts = [row["prompt"] for row in rows]
    expected = alone({"prompt": prompts})["answer"]
    assert [found[prompt] for prompt in prompts] == expected
    right = sum(found[row["prompt"]].strip() == row["expected"].strip() for row in rows)
    assert right >= 30 and f"{right} of them right" in done.stdout


def test_without_ray_it_says_so(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "specache_fx.examples.ray_batch", tmp_path / "answers"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and "pip install 'ray[data]'" in done.stderr
