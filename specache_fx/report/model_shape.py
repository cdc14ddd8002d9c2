"""`ModelShape`: the sizes of a transformers model that the memory plan needs, read from its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError, first_line

_REMEDY = "Give --layers, --kv-heads and --head-dim instead of --model."
_GIVE = (
    "Give --model a folder with a config.json, or the name of a model on the Hugging Face hub; or give --layers,"
    " --kv-heads and --head-dim instead."
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's KV cache.

    Attributes:
        layers: Attention layers that keep KV pairs of their own.
        num_kv_heads: Key/value heads of a layer.
        head_dim: Channels of a key, and of a value; of the rotated key where attention is latent (MLA).
        dtype: Name of the cache's dtype.
        window_layers: How many of the layers keep a window of the newest tokens.
        window: Tokens that a query of theirs reaches, its own included; None where no layer keeps a window.
        value_dim: Channels of a value where they are others: the latent's.
    """

    layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    window_layers: int = 0
    window: int | None = None
    value_dim: int | None = None


def load_model_shape(model: str) -> tuple[ModelShape, int | None]:
    """Read the shape of a model.

    Args:
        model: A folder with a `config.json`, that file itself, or a name on the Hugging Face hub.

    Returns:
        The shape; and the longest context that the config names, None where it names none.

    Raises:
        ConfigError: If there is no such config, or its layers' caches are of other shapes.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"The folder {model!r} has no config.json. {_GIVE}")
    # A name on the hub is "name" or "owner/name".
    if not path.exists() and (path.is_absolute() or len(path.parts) > 2 or model.startswith((".", "~"))):
        raise ConfigError(f"There is no file or folder {model!r}. {_GIVE}")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The config of model {model!r} can't be read. {_GIVE} (transformers says: {first_line(error)})"
        ) from error
    text = config.get_text_config(decoder=True)  # of a model with several parts
    return _shape_of(text, config.model_type), getattr(text, "max_position_embeddings", None)


def _shape_of(config: Any, kind: str) -> ModelShape:
    """The shape in a decoder's config.

    Raises:
        ConfigError: If an attribute is missing, or the layers' caches are of other shapes.
    """
    layers, window_layers, window = _layers(config, kind)
    dtype = str(getattr(config, "dtype", None) or ModelShape.dtype).removeprefix("torch.")
    if latent_dim := getattr(config, "kv_lora_rank", None):  # one head for all: a rotated key and a latent
        rope_dim = _number(config, kind, "qk_rope_head_dim")
        return ModelShape(layers, 1, rope_dim, dtype, window_layers, window, latent_dim)
    num_heads = _number(config, kind, "num_attention_heads")
    # Absent in models without grouped queries; None in configs that were saved so.
    num_kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        num_kv_heads = 1  # Falcon-7B, GPTBigCode
    head_dim = getattr(config, "head_dim", None) or _number(config, kind, "hidden_size") // num_heads
    return ModelShape(layers, num_kv_heads or num_heads, head_dim, dtype, window_layers, window)


def _number(config: Any, kind: str, name: str) -> int:
    """An attribute that must be there; configs map their own names (GPT-2's `n_layer`) to the common ones."""
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"The config of this {kind} model has no {name}. {_REMEDY}")
    return value


def _layers(config: Any, kind: str) -> tuple[int, int, int | None]:
    """Layers that have a cache, how many of them keep a window, and its tokens.

    A plan for layers that keep another cache than pairs a token and head would be silently wrong.
    """
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    windows = {
        "sliding_attention": sliding,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    types = getattr(config, "layer_types", None)
    if types is None:
        everywhere = next((name for name, window in windows.items() if window), "full_attention")
        types = [everywhere] * _number(config, kind, "num_hidden_layers")
    sharing = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    types = [name for name, mode in zip(types, sharing, strict=True) if mode != "reuse"]
    others = sorted(set(types) - {"full_attention", *windows})
    if getattr(config, "index_topk", None):
        others.append("index_topk: an index of keys besides")
    if others:
        raise ConfigError(
            f"This {kind} model has layers that don't keep one key and value a token and head ({', '.join(others)});"
            f" the plan knows no others yet. {_REMEDY}"
        )
    used = {windows[name] for name in types if name in windows}
    shapes = {
        (getattr(layer, "head_dim", None), getattr(layer, "num_key_value_heads", None))
        for layer in getattr(config, "per_layer_config", None) or ()
    }
    if len(used) > 1 or len(shapes) > 1:
        raise ConfigError(
            f"The layers of this {kind} model have caches of different shapes; the plan knows one shape and one window"
            f" yet. {_REMEDY}"
        )
    window = next(iter(used), None)
    return len(types), sum(name in windows for name in types), window
