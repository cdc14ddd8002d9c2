"""A padded row of a real model is as exact as the row alone, by any number of pads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specache_bench import fetch

PROMPT, STEPS = 600, 32


def distributions(model: PreTrainedModel, ids: Tensor, pads: int) -> Tensor:
    """Log-probabilities behind each of the last `STEPS` tokens of `ids`, [STEPS, vocab_size], decoded one by one."""
    padded = torch.cat([ids.new_full((1, pads), model.config.eos_token_id), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= pads).long()[None]
    past, at, found = None, 0, []
    with torch.no_grad():
        for length in (pads + PROMPT, *[1] * STEPS):
            until = at + length
            out = model(
                padded[:, at:until],
                past_key_values=past,
                use_cache=True,
                attention_mask=mask[:, :until],
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, at:until],
                logits_to_keep=1,
            )
            past, at = out.past_key_values, until
            found.append(out.logits[0, -1].float().log_softmax(-1))
    return torch.stack(found[1:])


@pytest.mark.nightly  # four minutes; by day tests/laws/test_padding.py has a tiny model
def test_left_padding_costs_a_row_nothing() -> None:
    folder, text = fetch.make("smollm2"), fetch.make("austen") / "austen.txt"
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text()[20000:26000], return_tensors="pt").input_ids
    ids = ids[:, : PROMPT + STEPS]

    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    exact, ours = distributions(load(), ids, 0), load()
    ours.compile(backend="specache", options={"bits": 2, "lowering": "eager"})
    kl = {}
    for pads in range(65):
        found = distributions(ours, ids, pads)
        kl[pads] = float((exact.exp() * (exact - found)).sum(-1).mean())
    # 0.0017 alone, and 0.033 with 62 pads when a group's statistics counted padding.
    assert max(kl.values()) <= 2 * kl[0] and kl[0] < 0.003, kl
