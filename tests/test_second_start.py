"""A second process finds what Inductor compiled for the first one: it can keep the graphs that we make."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import json
import torch
from torch._dynamo.utils import counters
from specache_fx import progress
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2)
).eval()
progress.QUIET_SECONDS = 0.0
model.compile(backend="specache", options={"group_size": 8, "residual_length": 8, "top_k": 8})
tokens = model.generate(torch.arange(20)[None], max_new_tokens=4, min_new_tokens=4, do_sample=False)
found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
print(json.dumps({"tokens": tokens.tolist(), **found}))
"""


def start(cache: Path) -> dict[str, object]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    found["said"] = re.findall(r"specache: compiling (.*?) with", done.stderr)
    return found


@pytest.mark.skipif(not torch._inductor.config.fx_graph_cache, reason="Inductor's cache is switched off here")
def test_second_start_compiles_nothing_anew(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert (first["hit"], first["bypass"]) == (0, 0)
    assert first["said"] == ["the decode step (5 layers)"]
    assert first["miss"] == 3  # parts of the step: before, between and behind its layers
    assert (second["hit"], second["miss"], second["bypass"]) == (3, 0, 0)
    assert second["tokens"] == first["tokens"]
