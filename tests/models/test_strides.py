"""An input of a decode step that is a slice: its strides change from call to call, where Inductor compiles for some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import SMALL, build, left_padded
from torch import Tensor

import specache_fx
from specache_fx.lowering import lower_static
from specache_fx.runners import decode_runner

BEFORE, LENGTHS = 20, (31, 33, 35, 37)


@pytest.mark.parametrize("sliced", nightly_unless("position_ids".__eq__, ["position_ids", "inputs_embeds"]))
@torch.no_grad()
def test_a_step_takes_a_slice_of_any_stride(sliced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = build("llama"), build("llama")
    made: list[Any] = []

    def lower(*args: Any, **how: Any) -> Any:
        made.append(args)
        return lower_static(*args, **how)

    monkeypatch.setattr(decode_runner, "lower_static", lower)
    specache_fx.compile(compiled, **{**SMALL, "bits": 2, "residual_length": 512, "lowering": "inductor"})

    def call(model: Any, mask: Tensor, q_len: int, past: Any = None) -> Any:
        ids = torch.arange(mask.shape[1]).expand_as(mask)
        whole = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        if sliced == "inputs_embeds":
            whole["inputs_embeds"] = plain.get_input_embeddings()(ids)
        else:
            whole["input_ids"] = ids
        given = {name: tensor[:, -q_len:] for name, tensor in whole.items()}
        given = {name: tensor if name == sliced else tensor.contiguous() for name, tensor in given.items()}
        return model(**given, attention_mask=mask, past_key_values=past)

    mask = left_padded((3, BEFORE))["attention_mask"]
    past = call(compiled, mask, BEFORE).past_key_values
    for _ in range(3):
        mask = torch.cat([mask, mask[:, -1:]], 1)
        past = call(compiled, mask, 1, past).past_key_values
    counts = []
    for kv_len in LENGTHS:
        mask = left_padded((3, kv_len))["attention_mask"]
        pasts = [call(plain, mask, kv_len).past_key_values for _ in range(2)]
        mask = torch.cat([mask, mask[:, -1:]], 1)
        expected, found = (
            call(model, mask, 1, past).logits for model, past in zip((plain, compiled), pasts, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        counts.append(len(made))
    assert sliced == "inputs_embeds" or counts[-1] == counts[-2]
