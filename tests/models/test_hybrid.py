"""Models with more than attention and tokens (recurrent states, embeddings as input) answer as the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.zoo import build
from torch import Tensor

import specache_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS: dict[str, Any] = {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4, "lowering": "eager"}
PROMPT = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(0))


def test_a_hybrid_of_convolutions_and_attention_equals_eager() -> None:
    model = build("lfm2")
    expected = model.generate(PROMPT, max_new_tokens=24, do_sample=False)
    model.compile(backend="specache", options=OPTIONS)
    out = model.generate(PROMPT, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert specache_fx.stats(out.past_key_values).steps == 23


@torch.no_grad()
def test_tokens_and_embeddings_may_take_turns() -> None:
    plain, model = build("plain", 1), build("plain", 1)
    model.compile(backend="specache", options=OPTIONS)
    embed = plain.get_input_embeddings()

    def run(model: Any) -> Tensor:
        out, logits = model(PROMPT, use_cache=True), []
        for i in range(8):
            token = torch.tensor([[5 + i], [50 + i]])
            step = {"inputs_embeds": embed(token)} if i % 3 == 1 else {"input_ids": token}
            out = model(**step, past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    torch.testing.assert_close(run(model), run(plain), rtol=1e-4, atol=1e-4)
