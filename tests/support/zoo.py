"""Small random transformers models: the twelve architectures that are supported, a hybrid, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 128
PAD_TOKEN_ID = 0
MAX_POSITIONS = 512
# Every option acts within a few dozen tokens.
SMALL: dict[str, Any] = {"group_size": 8, "residual_length": 8, "top_k": 8, "lowering": "eager"}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Random tied embeddings would say the last token again, whatever the attention.
    "tie_word_embeddings": False,
}
# Multi-head attention and one vector of dimensions: their configs know no GQA, or call it by other names.
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "phi3": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
NAMES = tuple(_OWN)
# Attention and short convolutions in turn: a state that is updated in place beside the KV cache.
_HYBRID: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
}


def build(name: str, **overrides: Any) -> nn.Module:
    """A random decoder of one architecture: 2 layers, hidden size 64, heads of 16, GQA 4 to 2 where it has it.

    Args:
        name: One of `NAMES`, or "lfm2".
        **overrides: Fields of its config.

    Returns:
        A model in eval mode whose `generate()` never stops early.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**_COMMON, **{**_OWN, **_HYBRID}[name], **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    # Random weights of std 0.02 make near-uniform attention and logits: nothing that is forgotten would be missed.
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data.normal_(std=0.15, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    return model


def left_padded(lengths: tuple[int, ...] = (5, 12, 9), seed: int = 0) -> dict[str, Tensor]:
    """Random prompts of these lengths, padded on the left: `input_ids` and `attention_mask`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, VOCAB_SIZE, (len(lengths), width), generator=generator)
    mask = (torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.where(mask.bool(), ids, PAD_TOKEN_ID), "attention_mask": mask}
