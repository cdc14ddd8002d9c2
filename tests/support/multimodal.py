"""Small random models that hold a text decoder: vision-language models, and encoders with a decoder."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.zoo import COMMON, PAD_TOKEN_ID, VOCAB_SIZE, made_to_tell
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

IMAGE_TOKEN, IMAGE_START, IMAGE_END = 127, 125, 124

_PICTURE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **COMMON},
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": 28,
            "patch_size": 14,
            "projection_dim": 32,
            **_PICTURE,
        },
        "image_token_index": IMAGE_TOKEN,
    },
    "qwen2_5_vl": {
        "text_config": {
            **COMMON,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 126,
        "vision_start_token_id": IMAGE_START,
        "vision_end_token_id": IMAGE_END,
    },
    "gemma3": {
        "text_config": {
            **COMMON,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {"image_size": 28, "patch_size": 7, **_PICTURE},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": IMAGE_START,
        "eoi_token_index": IMAGE_END,
    },
}
_SIZES = {"d_model": 64, "vocab_size": VOCAB_SIZE, "pad_token_id": PAD_TOKEN_ID, "decoder_start_token_id": 1}
_SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {**_SIZES, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "bart": {
        **_SIZES,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_position_embeddings": 128,
        "forced_eos_token_id": None,
    },
}


def build_vision(name: str) -> nn.Module:
    """llava, qwen2_5_vl or gemma3: two vision layers, two text layers (one with a window of 16 in gemma3)."""
    return _build(AutoModelForImageTextToText, name, _VISION[name])


def build_seq2seq(name: str) -> nn.Module:
    """t5 or bart: two encoder and two decoder layers."""
    return _build(AutoModelForSeq2SeqLM, name, _SEQ2SEQ[name])


def _build(kind: Any, name: str, fields: dict[str, Any]) -> nn.Module:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: Any = made_to_tell(kind.from_config(AutoConfig.for_model(name, **fields)).eval())
    model.generation_config.forced_eos_token_id = None
    return model  # type: ignore[no-any-return]


def picture_prompt(name: str) -> dict[str, Tensor]:
    """A picture (four tokens) within each of two prompts of 14 tokens; the first has two of padding on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 120, (2, 14), generator=generator)
    ids[:, 2], ids[:, 3:7], ids[:, 7] = IMAGE_START, IMAGE_TOKEN, IMAGE_END
    mask = torch.ones_like(ids)
    ids[0, :2], mask[0, :2] = PAD_TOKEN_ID, 0
    prompt = {"input_ids": ids, "attention_mask": mask}
    if name == "qwen2_5_vl":
        patches = torch.randn(2 * 16, 3 * 2 * 14 * 14, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * 2)
        types = (ids == IMAGE_TOKEN).long()
        return {**prompt, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}
    prompt["pixel_values"] = torch.randn(2, 3, 28, 28, generator=generator)
    if name == "gemma3":
        prompt["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return prompt
