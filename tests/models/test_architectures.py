"""The table of architectures holds: a few types measured anew, and all of it complete and without a wrong row.

`make architectures` measures all of them.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from architectures import table
from architectures.configs import TYPES
from architectures.measure import CASES, TOLERANCE, measure, with_untraced_prompts
from support.cases import nightly_unless

# One of each kind: plain, learned positions, ALiBi, sliding and full layers, mixture, softmax with sinks, latent
# attention, convolutions beside attention, no KV cache.
FEW = ("llama", "opt", "bloom", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3", "lfm2", "mamba")
SAME_VERSIONS = pytest.mark.skipif(
    transformers.__version__ != table.made_with(), reason="the table was made with another transformers"
)


@SAME_VERSIONS
def test_every_causal_lm_type_has_a_row() -> None:
    assert set(table.load()) == set(TYPES)


def test_no_row_is_wrong() -> None:
    assert {
        name: table.reasons(row) for name, row in table.load().items() if row["verdict"] in table.BAD
    } == {}


def test_every_type_that_is_left_alone_has_its_reason() -> None:
    assert [name for name, row in table.load().items() if table.reasons(row) == table.NO_REASON] == []


@SAME_VERSIONS
def test_what_is_to_be_read_is_what_was_measured() -> None:
    assert table.MARKDOWN.read_text() == table.markdown(table.load())


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("model_type", nightly_unless(("llama", "mamba").__contains__, FEW))
def test_no_type_is_worse_than_its_row(model_type: str) -> None:
    padded = next(iter(CASES))
    with torch.random.fork_rng():
        row = measure(model_type, [padded])
    assert table.worse(row, table.load()[model_type]) == []


@pytest.mark.parametrize("model_type", nightly_unless("qwen3".__eq__, ["qwen3", *FEW]))
def test_a_prompt_without_a_graph_is_as_equal(model_type: str) -> None:
    case = with_untraced_prompts(model_type)
    assert case.get("error") is None and case["tokens_equal"] and case["difference"] <= TOLERANCE


def test_worse_sees_verdicts_layers_and_lanes() -> None:
    case = {"rewritten": 2, "lanes": 2, "refusals": [], "fallback": None}
    good = {"verdict": "rewritten", "kv_layers": 2, "cases": {"bits 16": case}}
    one_lane = {**good, "cases": {"bits 16": {**case, "lanes": 1, "fallback": "no token"}}}
    assert table.worse(good, good) == table.worse(good, one_lane) == []
    assert table.worse(one_lane, good) == ["bits 16: lanes 2 became 1: one lane: no token"]
    assert table.worse({**good, "verdict": "WRONG"}, good) == ["verdict 'rewritten' became 'WRONG': "]
