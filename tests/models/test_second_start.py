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
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = """
import json
import os
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from specache_fx.report import progress
from transformers import LlamaConfig, LlamaForCausalLM

given = Path(os.environ.get("ARTIFACTS", "none"))
if given.is_file():
    torch.compiler.load_cache_artifacts(given.read_bytes())
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2)
).eval()
progress.QUIET_SECONDS = 0.0
model.compile(backend="specache", options={"group_size": 8, "residual_length": 8, "top_k": 8})
tokens = model.generate(torch.arange(20)[None], max_new_tokens=4, min_new_tokens=4, do_sample=False)
found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
if given.name != "none" and not given.is_file():
    given.write_bytes(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({"tokens": tokens.tolist(), **found}))
"""


def start(cache: Path, artifacts: Path | None = None) -> dict[str, object]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    if artifacts is not None:
        environment["ARTIFACTS"] = str(artifacts)
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


@pytest.mark.nightly
@pytest.mark.skipif(not torch._inductor.config.fx_graph_cache, reason="Inductor's cache is switched off here")
def test_second_start_compiles_nothing_anew(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert (first["hit"], first["bypass"]) == (0, 0)
    assert first["said"] == ["the decode step (5 layers)"]
    assert first["miss"] == 3  # parts of the step: before, between and behind its layers
    assert (second["hit"], second["miss"], second["bypass"]) == (3, 0, 0)
    assert second["tokens"] == first["tokens"]


@pytest.mark.nightly
@pytest.mark.skipif(not torch._inductor.config.fx_graph_cache, reason="Inductor's cache is switched off here")
def test_another_machine_compiles_nothing_that_it_is_given(tmp_path: Path) -> None:
    """PyTorch's mega-cache: what one process compiled, as bytes."""
    artifacts = tmp_path / "artifacts"
    first = start(tmp_path / "one", artifacts)
    assert artifacts.is_file() and first["miss"] == 3
    second = start(tmp_path / "other", artifacts)
    assert (second["hit"], second["miss"]) == (3, 0)
    assert second["tokens"] == first["tokens"]


def test_nothing_recompiles_after_two_lengths() -> None:
    """So `set_stance("fail_on_recompile")` can be set once a server is warm."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    form = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    expected = [model.generate(torch.arange(length)[None], **form) for length in (20, 31, 26)]
    model.compile(backend="specache", options={"bits": 16, "group_size": 8, "lowering": "eager"})
    for length in (20, 31):
        model.generate(torch.arange(length)[None], **form)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = [model.generate(torch.arange(length)[None], **form) for length in (20, 31, 26)]
    assert all(map(torch.equal, found, expected))
