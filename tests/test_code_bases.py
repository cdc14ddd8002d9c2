"""Code bases outside transformers, each in its own words: one line of ours, its own `generate`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specache_fx

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("fresh_dynamo")]
OPTIONS: dict[str, Any] = {"bits": 16, "group_size": 16, "residual_length": 16, "top_k": 8, "strict": True}
PACKAGES = ("ibm-fms==1.13.1", "frozendict")


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The packages, without what they depend on."""
    folder = str(tmp_path_factory.mktemp("packages"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
    subprocess.run(command, check=True)
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    return model.eval().requires_grad_(False)


def test_ibm_fms_generates_the_same() -> None:
    from fms.models.llama import LLaMA, LLaMAConfig
    from fms.utils.generation import generate

    config = LLaMAConfig(
        src_vocab_size=97, emb_dim=64, nheads=4, kvheads=2, nlayers=2, max_expected_seq_len=256, pad_id=0
    )
    model = randomised(LLaMA(config))
    ids = torch.randint(1, 97, (30,), generator=torch.Generator().manual_seed(1))
    expected = generate(model, ids, max_new_tokens=100, use_cache=True, do_sample=False)
    compiled = torch.compile(model, backend="specache", options=OPTIONS)
    found = generate(compiled, ids, max_new_tokens=100, use_cache=True, do_sample=False)
    assert torch.equal(found, expected)
    report = specache_fx.explain(
        model, run=lambda each: generate(each, ids, max_new_tokens=4, use_cache=True, do_sample=False)
    )
    assert [len(graph.rewritten) for graph in report.graphs] == [2, 2] and report.graphs[1].lanes == 2
