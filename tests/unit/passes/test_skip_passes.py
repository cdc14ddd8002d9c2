"""`skip_passes`: a pass is left out by its name, and the answers stay."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support import graphs
from support.captured import captured
from support.zoo import build

import specache_fx
from specache_fx import ConfigError
from specache_fx.capture.program import Phase
from specache_fx.config import SpecacheConfig
from specache_fx.passes.pipeline import BINDING_PASSES, DECODE_PASSES, OPTIONAL

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
TWO_LANES: dict[str, Any] = {"top_k": 4, "lookahead": "token"}
IDS = torch.arange(2, 42).reshape(2, 20)


def generated(model: torch.nn.Module, **options: object) -> torch.Tensor:
    torch._dynamo.reset()
    specache_fx.compile(model, lowering="eager", group_size=8, residual_length=8, **TWO_LANES, **options)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    out: torch.Tensor = model.generate(  # type: ignore[operator]
        IDS, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    return out


def test_a_pass_that_is_left_out_changes_no_answer_and_a_log_says_what_each_did(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="specache_fx")
    expected = generated(build("plain", 1))
    assert any("analysed: decode" in message and "ms" in message for message in caplog.messages)
    (waits,) = {message.split(" ms")[1] for message in caplog.messages if message.startswith("insert_waits")}
    assert waits == ", specache.wait_prefetch.default +1"
    of_steps = {step.name for step in (*BINDING_PASSES[Phase.DECODE], *DECODE_PASSES)}
    for name in sorted(OPTIONAL):
        caplog.clear()
        assert torch.equal(generated(build("plain", 1), skip_passes=[name]), expected), name
        assert (f"{name}: skipped" in caplog.messages) == (name in of_steps)
        assert not any(said.startswith(f"{name}: ") and "nodes" in said for said in caplog.messages)


def test_a_pass_of_prompts_is_left_out() -> None:
    config = SpecacheConfig(skip_passes=("prompt_masks",))
    gm, _ = graphs.bound(captured("tiny")[Phase.PREFILL], config)
    assert graphs.nodes_of(gm, torch.ops.specache.prompt_attention.default) == []
    gm, _ = graphs.bound(captured("tiny")[Phase.PREFILL])
    assert graphs.nodes_of(gm, torch.ops.specache.prompt_attention.default) != []


@pytest.mark.parametrize(
    "names", [["bind_cache"], ["verify"], ["no_such_pass"], ["few_row_products", "insert_waits"]]
)
def test_only_passes_that_change_no_answer_can_be_left_out(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{', '.join(sorted(OPTIONAL))} can be left"):
        specache_fx.compile(build("plain", 1), skip_passes=names)


@pytest.mark.parametrize("given", ["few_row_products", 5, None, [1]])
def test_what_is_no_list_of_names_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="give a list of names"):
        SpecacheConfig.from_options({"skip_passes": given})
