"""Weights that are tensor subclasses: a model that torchao has quantised equals itself uncompiled, in both lanes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.zoo import TWO_LANES, build, left_padded
from torch import nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup

import specache_fx
from specache_fx.capture.graph.subclasses import flatten, unflatten

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Int4WeightOnlyConfig packs for kernels that no CPU has (mslk, CUDA, XPU). This one runs anywhere, unpacked; the other
# is packed for PyTorch's own CPU kernel.
INT4 = partial(IntxWeightOnlyConfig, weight_dtype=torch.int4, granularity=PerGroup(32))
PACKED_INT4 = partial(PrototypeInt4WeightOnlyConfig, group_size=32, set_inductor_config=False)
QUANTISED: dict[str, Any] = {
    "int8": Int8WeightOnlyConfig,
    "float8": Float8WeightOnlyConfig,
    "int4": INT4,
    "packed int4": PACKED_INT4,
}
PROMPT = left_padded()


def quantised(weights: str) -> nn.Module:
    model = build("llama", 1)
    quantize_(model, QUANTISED[weights]())
    return model


@pytest.mark.parametrize("weights", nightly_unless("int8".__eq__, QUANTISED))
def test_quantised_model_equals_itself_uncompiled(weights: str) -> None:
    plain = quantised(weights)
    model = copy.deepcopy(plain)
    model.compile(backend="specache", options={**TWO_LANES, "bits": 16, "lowering": "eager"})
    kwargs: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    expected = plain.generate(**PROMPT, output_logits=True, **kwargs)
    found = model.generate(**PROMPT, output_logits=True, **kwargs)
    assert torch.equal(found.sequences, expected.sequences)
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    # The cache is exact, so the speculative token is the next one: the second lane is right too.
    assert specache_fx.stats(found.past_key_values).exact_hit_rate == 1.0
    # Several tokens more, of the next turn.
    more, pads = PROMPT["input_ids"][:, -5:], PROMPT["attention_mask"]
    mask = torch.cat([pads, torch.ones(len(pads), 23 + 5, dtype=pads.dtype)], 1)
    with torch.no_grad():
        mine, theirs = (
            each(more, attention_mask=mask, past_key_values=out.past_key_values).logits
            for each, out in ((model, found), (plain, expected))
        )
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", QUANTISED)
def test_a_subclass_is_put_together_again(weights: str) -> None:
    weight = quantised(weights).model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr, index]
    values = [torch.ones(2), 3, weight]
    plain = flatten(values)
    assert len(plain) >= 4 and all(type(tensor) is torch.Tensor for tensor in plain[2:])
    ones, three, again = unflatten(values, plain)
    assert ones is plain[0] and three == plain[1] == 3 and type(again) is type(weight)
    x = torch.randn(3, weight.shape[1])
    torch.testing.assert_close(nn.functional.linear(x, again), nn.functional.linear(x, weight))
