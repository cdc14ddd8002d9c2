"""A small random model of every causal-LM type that transformers knows.

`shrink` makes a config of a type small by the names of its fields; `_OWN` holds what one type needs besides. Both kinds
of layers of a hybrid, sliding or mixture family stay in: the default config is asked which there are.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import transformers
from support.zoo import PAD_TOKEN_ID, VOCAB_SIZE, made_to_tell
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention")
# Every config that has a field of this name gets this value.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "tie_word_embeddings": False,
    "use_cache": True,
    "dtype": "float32",
    # width
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "emb_dim", "word_embed_proj_dim", "embedding_size"), 64
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 96),
    "max_position_embeddings": 256,
    "n_positions": 256,
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 16,
    "rotary_dim": 8,
    "is_decoder": True,
    "index_topk": 8,
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention"), 16
    ),
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 16),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 2),
    # experts
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32
    ),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "first_k_dense_replace": 1,
    # pictures and sound, which no prompt of ours has
    **dict.fromkeys(("depth", "encoder_depth"), 1),
    # recurrence
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}

# What one type needs besides, or otherwise.
_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_chunk_size": 8}
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
}
_GEMMA4 = {**_SHARED_KV, "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}}}
_SWA = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 16,
}
_ADAPTER = {"adapter_in_dim": 64, "adapter_input_size": 64, "adapter_out_dim": 64}
_BLT = {"hidden_size_global": 64, "num_key_value_heads": 4, "vocab_size": 260}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **_MAMBA2},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 100,
        "encoder_config": _BLT,
        "decoder_config": _BLT,
        "patcher_config": {"num_key_value_heads": 4, "vocab_size": 260},
        "global_config": {"num_key_value_heads": 4},
    },
    "cohere_compass_text": {
        **_SLIDING_AND_FULL,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
    },
    "cpmant": {"dim_ff": 96, "dim_head": 16, "position_bias_num_buckets": 32, "prompt_length": 8},
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, **_SLIDING_AND_FULL},
    "dots3_note": {"text_config": _SWA, "audio_config": _ADAPTER, "vision_config": _ADAPTER},
    "dots3_note_text": _SWA,
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "gemma3n_text": {
        **_SHARED_KV,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64}},
    "gpt_neo": {"attention_types": [[["local", "global"], 1]], "window_size": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], **_MAMBA2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "laguna": _SLIDING_AND_FULL,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": {"attention_chunk_size": 16}},
    "llama4_text": {"attention_chunk_size": 16},
    "longcat_flash": {
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"head_dim": 32, "n_groups": 1, "chunk_size": 8},
    "mellum": _SLIDING_AND_FULL,
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {
        "pronunciation_vocab_size": VOCAB_SIZE,
        "shape_vocab_size": VOCAB_SIZE,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "xlm": {"causal": True, "mask_token_id": 5},
    "xlstm": {"hidden_size": 128, "chunk_size": 16},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}

# Types of which no small model can generate text from tokens alone, and why.
NOT_BUILT: dict[str, str] = {
    "gemma4_assistant": "drafts for another model and reads that model's KV pairs",
    "gemma4_unified_assistant": "drafts for another model and reads that model's KV pairs",
    "musicgen": "it makes sound out of another encoder's states: generate() takes no tokens alone",
    "musicgen_melody": "it makes sound out of another encoder's states: generate() takes no tokens alone",
    "gemma3n": "its vision tower needs the timm package (gemma3n_text is its decoder)",
}

# What `generate()` of a type needs besides.
GENERATE: dict[str, dict[str, Any]] = {
    "blt": {
        "use_cache": False
    }  # with a cache, transformers' own generate() asks its config for a field it hasn't
}


def _kinds(values: list[str], least: int) -> list[str]:
    """One layer of each kind, full attention last, repeated until there are at least so many."""
    kinds = sorted(dict.fromkeys(values), key=lambda kind: kind == "full_attention")
    return kinds * -(-least // len(kinds))


def shrink(config_class: type[PreTrainedConfig], own: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A small config of a class, its parts (`text_config`) included.

    Args:
        config_class: Of transformers.
        own: Fields with other values than `_SIZES` has; a dict for a part is for the part's fields.
    """
    own = own or {}
    default = config_class()
    names = {field.name for field in fields(config_class)}
    changed: dict[str, Any] = {name: value for name, value in _SIZES.items() if name in names}
    for name in _WINDOWS:
        if name in changed and getattr(default, name) is None:
            del changed[name]  # as it comes, the type has no window
    layers = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in changed), None)
    for pattern in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types"):
        values = getattr(default, pattern, None)
        if pattern in names and isinstance(values, list) and values:
            changed[pattern] = _kinds(values, 2)
    if layers is not None:
        num_layers = max(
            [len(changed[p]) for p in changed if p.endswith(("_types", "_block_type"))], default=2
        )
        changed[layers] = num_layers = own.get(layers, num_layers)
        for pattern in [p for p in changed if p.endswith(("_types", "_block_type"))]:
            changed[pattern] = (changed[pattern] * num_layers)[-num_layers:]
    if "kv_lora_rank" in names:  # latent attention has no groups, and derives the width of a head
        changed["num_key_value_heads"] = changed.get("num_attention_heads", ...)
        changed.pop("head_dim", None)
    parts = {name: type(part) for name, part in vars(default).items() if isinstance(part, PreTrainedConfig)}
    parts |= {
        name: part for name, part in config_class.sub_configs.items() if name not in parts and name in names
    }
    parts = {name: part for name, part in parts.items() if issubclass(part, PreTrainedConfig)}
    for name, part in parts.items():
        changed[name] = shrink(part, own.get(name))
    changed.update({name: value for name, value in own.items() if name not in parts})
    return config_class(**{name: value for name, value in changed.items() if value is not ...})


def small_config(model_type: str) -> PreTrainedConfig:
    """The small config of one of `TYPES`."""
    return shrink(CONFIG_MAPPING[model_type], _OWN.get(model_type))


def build(model_type: str, attention: str | None = None) -> nn.Module:
    """A random model of one of `TYPES`, in eval mode, whose `generate()` never stops early.

    Args:
        model_type: The type.
        attention: Implementation of attention; the type's own choice by default.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    chosen = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(small_config(model_type), **chosen).float().eval()
    return made_to_tell(model)


def recipe(model_type: str) -> str:
    """All that decides what `build` and `generate()` do for a type, as text."""
    return repr([table.get(model_type) for table in (_OWN, NOT_BUILT, GENERATE)] + [_SIZES])
