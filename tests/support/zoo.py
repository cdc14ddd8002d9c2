"""Small random transformers models: the twelve architectures that are supported, a hybrid, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

VOCAB_SIZE = 128
PAD_TOKEN_ID = 0
MAX_POSITIONS = 512
# Every option acts within a few dozen tokens.
SMALL: dict[str, Any] = {"group_size": 8, "residual_length": 8, "top_k": 8, "lowering": "eager"}
TWO_LANES = SMALL | {"lookahead": "token"}
"""On a CPU too."""

COMMON: dict[str, Any] = {
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
WINDOW = 16
_WINDOW_AND_ALL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_SHARED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
_WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": _WINDOW_AND_ALL,
    "mistral-window": {"sliding_window": WINDOW},
    "exaone4": {**_WINDOW_AND_ALL, "sliding_window_pattern": 2},
    "cohere2": _WINDOW_AND_ALL,
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "qwen2-window": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "olmo3": _WINDOW_AND_ALL,
    "gemma3n_text": {
        **_SHARED,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**_SHARED, "global_head_dim": 32},
    "gemma2-window": _WINDOW_AND_ALL,
    "gpt_oss-window": {**_WINDOW_AND_ALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}
_PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain-window": _WINDOW_AND_ALL,
    "plain-windows": {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2},
}
WINDOWED_NAMES = tuple(_WINDOWED)
"""Models with a sliding window or chunks of `WINDOW` tokens in some layers or all; two have layers that share KV."""
# What is cached is a rotated key and a latent, one head of each.
_LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 20,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }
}
# Attention and short convolutions in turn: a state that is updated in place beside the KV cache.
_HYBRID: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
}
_GPTJ = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": MAX_POSITIONS}
# Attention that is no SDPA call, or one with biases in its mask.
_SPELT_OUT: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "use_cache": True},
    "falcon": {"alibi": True, "num_kv_heads": 2},
    "gptj": _GPTJ,
    "codegen": {**_GPTJ, "n_ctx": MAX_POSITIONS},
    "xglm": {"d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4},
    "gemma2": {"layer_types": ["full_attention"] * 2},
    "gpt_oss": {"layer_types": ["full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
}
# Fields that their configs compute from others, or whose name they have for another thing.
_NOT_OF = {
    "falcon": {"head_dim"},
    "gpt_neo": {"num_hidden_layers", "num_attention_heads"},
    "deepseek_v3": {"head_dim"},
}


class _PlainLayer(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.index, self.head_dim, hidden = index, config.head_dim, config.hidden_size
        kv = config.num_key_value_heads * config.head_dim
        self.is_parallel = getattr(config, "is_parallel", False)
        self.has_window = config.layer_types[index] == "sliding_attention"
        for name, width in {"q": hidden, "k": kv, "v": kv, "o": hidden, "up": hidden, "down": hidden}.items():
            self.add_module(f"{name}_proj", nn.Linear(hidden, width, bias=False))

    def forward(self, x: Tensor, masks: list[Tensor], past: Any) -> Tensor:
        q, k, v = (
            side(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for side in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past is not None:
            k, v = past.update(k, v, self.index)
        mask = masks[int(self.has_window)][..., -k.shape[2] :]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        y = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return y + self.down_proj(F.silu(self.up_proj(x if self.is_parallel else y)))


class Plain(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder for `generate()` and its caches, of few operators: Dynamo traces it in half of Llama's time.

    With `is_parallel` in its config a feed-forward reads what attention reads.
    """

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(_PlainLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = True,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        past = past_key_values
        if past is None and use_cache:
            past = DynamicCache(config=self.config)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        start, count = 0 if past is None else past.get_seq_length(), x.shape[1]
        if position_ids is None:
            position_ids = torch.arange(start, start + count)[None]
        mask = torch.ones(count, start + count, dtype=torch.bool).tril(start)[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None]
        x = x + self.places(position_ids)
        masks, window = [mask], self.config.sliding_window
        if window is not None:
            masks.append(mask & torch.ones(count, start + count, dtype=torch.bool).triu(start - window + 1))
        for layer in self.layers:
            x = layer(x, masks, past)
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(x)), past_key_values=past)


_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def build(name: str, layers: int | None = None, **overrides: Any) -> nn.Module:
    """A random decoder of one architecture: 2 layers, hidden size 64, heads of 16, GQA 4 to 2 where it has it.

    Args:
        name: One of `NAMES` or `WINDOWED_NAMES`, "lfm2", "deepseek_v3", one whose attention is spelt
            out (bloom, gpt_oss, ...), or one of `Plain`: where the architecture is no matter.
        layers: Fewer than it has: Dynamo's tracing, which is most of a test's time, grows with them.
        **overrides: Fields of its config.

    Returns:
        A model in eval mode whose `generate()` never stops early.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    known = {**_PLAIN, **_OWN, **_HYBRID, **_SPELT_OUT, **_WINDOWED, **_LATENT}
    fields = {**COMMON, **known[name], **overrides}
    attention = fields.pop("attn_implementation", None)
    if layers is not None:
        fields |= {field: layers for field in _LAYERS if field in fields}
        fields |= {field: fields[field][:layers] for field in ("layer_types",) if field in fields}
        fields |= {"attention_types": [[["global"], layers]]} if "attention_types" in fields else {}
    fields = {field: value for field, value in fields.items() if field not in _NOT_OF.get(name, ())}
    if name in _PLAIN:
        fields = {
            "sliding_window": None,
            "layer_types": ["full_attention"] * fields["num_hidden_layers"],
            **fields,
        }
        return made_to_tell(Plain(LlamaConfig(**fields)).eval())
    config = AutoConfig.for_model(name.removesuffix("-window"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    return made_to_tell(model)


def made_to_tell(model: Any) -> nn.Module:
    """A model whose attention matters, and whose `generate()` never stops early.

    Random weights of std 0.02 make near-uniform attention and logits: nothing that is forgotten would be missed.
    """
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data.normal_(std=0.15, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    return model  # type: ignore[no-any-return]


def left_padded(lengths: tuple[int, ...] = (5, 12, 9), seed: int = 0) -> dict[str, Tensor]:
    """Random prompts of these lengths, padded on the left: `input_ids` and `attention_mask`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, VOCAB_SIZE, (len(lengths), width), generator=generator)
    mask = (torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.where(mask.bool(), ids, PAD_TOKEN_ID), "attention_mask": mask}
