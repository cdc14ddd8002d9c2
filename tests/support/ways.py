"""Ways of generating, and of using the cache that comes out of it: each is to equal the uncompiled model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.zoo import WINDOWED_NAMES, build, left_padded
from torch import Tensor, nn

EXACT = {"rtol": 2e-4, "atol": 2e-4}  # float32, another order of sums
PADDED = left_padded()
# Row 1 has no padding.
ALONE = {"input_ids": PADDED["input_ids"][1:2].clone()}
REPEATS = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])}


def generate(
    model: nn.Module, prompt: dict[str, Tensor] = PADDED, new_tokens: int = 30, **kwargs: Any
) -> Tensor:
    torch.manual_seed(3)
    return model.generate(**prompt, **{"max_new_tokens": new_tokens, "do_sample": False, **kwargs})


@torch.no_grad()
def step(model: nn.Module, token: Tensor, past: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
    """Logits of the last token [batch, vocab_size], and the cache."""
    out = model(token, past_key_values=past, use_cache=True, **kwargs)
    return out.logits[:, -1], out.past_key_values


def own_loop(model: nn.Module, prompt: Tensor, steps: int, past: Any = None, **kwargs: Any) -> Tensor:
    """Greedy, without attention_mask and position_ids: logits [steps, batch, vocab_size]."""
    found = []
    for _ in range(steps):
        logits, past = step(model, prompt, past, **kwargs)
        prompt = logits.argmax(-1)[:, None]
        found.append(logits)
    return torch.stack(found)


DRAFT = "draft"
WAYS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "greedy": (PADDED, {}),
    "sampling": (PADDED, {"do_sample": True}),
    "sampling_top_p": (PADDED, {"do_sample": True, "top_p": 0.8, "top_k": 0, "temperature": 0.7}),
    "return_sequences_sampling": (PADDED, {"do_sample": True, "num_return_sequences": 2}),
    "no_attention_mask": (ALONE, {}),
    "no_cache": (PADDED, {"use_cache": False, "max_new_tokens": 6}),
    "prefill_chunk_size": (left_padded((20, 13, 17)), {"prefill_chunk_size": 6}),
    "prompt_lookup": (REPEATS, {"prompt_lookup_num_tokens": 3}),
    "assistant_model": (ALONE, {"assistant_model": DRAFT}),
    "assistant_model_sampling": (ALONE, {"assistant_model": DRAFT, "do_sample": True}),
    "early_exit": (ALONE, {"assistant_early_exit": 1}),
    "beams": (PADDED, {"num_beams": 3}),
    "beams_sampling": (PADDED, {"num_beams": 2, "do_sample": True}),
    "beams_return_sequences": (PADDED, {"num_beams": 4, "num_return_sequences": 2}),
    "one_token_prompt": ({"input_ids": torch.tensor([[5], [9]])}, {}),
    "two_token_prompt": ({"input_ids": torch.tensor([[5, 7], [9, 8]])}, {}),
}


def arguments(way: str, architecture: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Prompt and arguments of one of `WAYS` for `generate`, with a draft model where it needs one."""
    prompt, kwargs = WAYS[way]
    if kwargs.get("assistant_model") == DRAFT:
        small: dict[str, Any] = {"gpt2": {"n_layer": 1}}.get(architecture, {"num_hidden_layers": 1})
        if architecture in WINDOWED_NAMES:
            small = {**small, "layer_types": ["full_attention"]}
        kwargs = {**kwargs, "assistant_model": build(architecture, **small)}
    return prompt, kwargs


def conversation(model: nn.Module) -> Tensor:
    """Three turns on one cache: the sequence in the end."""
    sequence, mask, past = PADDED["input_ids"], PADDED["attention_mask"], None
    for turn in range(3):
        out: Any = generate(
            model,
            {"input_ids": sequence, "attention_mask": mask},
            new_tokens=11,
            past_key_values=past,
            return_dict_in_generate=True,
        )
        past = out.past_key_values
        sequence = torch.cat(
            [out.sequences, PADDED["input_ids"][[1, 1, 1], turn : turn + 1 + 2 * turn]], dim=1
        )
        mask = torch.cat([mask, mask.new_ones(3, sequence.shape[1] - mask.shape[1])], dim=1)
    return sequence


def crop_and_go_on(model: nn.Module, removed: int = 19) -> Tensor:
    """Logits after the newest tokens of a cache were cut off."""
    out: Any = generate(model, ALONE, new_tokens=30, return_dict_in_generate=True)
    past = out.past_key_values
    kept = past.get_seq_length() - removed
    past.crop(-removed)
    assert past.get_seq_length() == kept
    return own_loop(model, torch.tensor([[77]]), 24, past)


@torch.no_grad()
def fork_and_go_on_with_both(model: nn.Module) -> Tensor:
    """Logits of a cache and its copy, by turns."""
    past = step(model, PADDED["input_ids"])[1]
    logits = [step(model, torch.full((3, 1), token), past)[0] for token in (3, 4)]
    twin = copy.deepcopy(past)
    logits += [step(model, torch.full((3, 1), token), twin)[0] for token in range(5, 15)]
    logits += [step(model, torch.full((3, 1), token), past)[0] for token in (15, 16, 17)]
    logits += [step(model, torch.full((3, 1), token), twin)[0] for token in (18, 19)]
    return torch.stack(logits)
