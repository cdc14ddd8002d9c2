"""Tensor parallel, as transformers does it: two processes, each with half of the heads and of the vocabulary."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest
import torch
from support.process import python
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tensor_parallel import SETTINGS

pytest.importorskip("torch.distributed.tensor")


DAILY = ("exact", "refetch")


@pytest.fixture(
    scope="module", params=[DAILY, pytest.param((*SETTINGS,), marks=pytest.mark.nightly)], ids=len
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, with some of `SETTINGS`."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,  # shards of 49 and 48
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1 if request.param == DAILY else 2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    python(*run, "tests/support/tensor_parallel.py", str(folder), *request.param)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_generate_as_one(ranks: list[dict[str, Any]]) -> None:
    """Tokens are equal. A process has half of the heads, so that rates of a single process are means over both."""
    for name in ranks[0]["single"].keys() - {"eager"}:
        single = ranks[0]["single"][name]
        sharded = [rank["sharded"][name] for rank in ranks]
        assert all(rank["tokens"] == single["tokens"] for rank in sharded)
        assert sum(rank["bytes"] for rank in sharded) == single["bytes"]
        for rate in ("topk_hit_rate", "attention_hit_rate"):
            if single[rate] is not None:
                assert fmean(rank[rate] for rank in sharded) == pytest.approx(single[rate], abs=1e-3)
        for of_tokens in ("exact_hit_rate", "accepted_steps", "refetched_steps"):
            assert all(rank[of_tokens] == single[of_tokens] for rank in sharded)


def test_exact_caches_generate_as_eager_does(ranks: list[dict[str, Any]]) -> None:
    eager = ranks[0]["single"]["eager"]["tokens"]
    assert all(rank["sharded"]["exact"]["tokens"] == eager for rank in ranks)


def test_guesses_come_true_on_every_process(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["sharded"]["exact"]["accepted_steps"] > 0 for rank in ranks)
    assert all(rank["sharded"]["refetch"]["exact_hit_rate"] > 0 for rank in ranks)


def test_strict_refuses_a_lost_lane(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert 'lookahead="token" is not possible here' in rank["refusal"]
        assert 'Take lookahead="query"' in rank["refusal"]
