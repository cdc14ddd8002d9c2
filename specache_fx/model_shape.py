"""`ModelShape`: what the memory plan needs to know of a transformers model, read from its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError

_REMEDY = "Give --layers, --kv-heads and --head-dim instead of --model."
_GIVE = (
    "Give --model a folder with a config.json, or the name of a model on the Hugging Face hub; or give --layers,"
    " --kv-heads and --head-dim instead."
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's KV cache.

    Attributes:
        layers: Attention layers.
        num_kv_heads: Key/value heads of a layer.
        head_dim: Channels of a key, and of a value.
        max_context: The longest context that the config names; None where it names none.
        dtype: Name of the dtype that the weights were saved in; None where the config doesn't say.
    """

    layers: int
    num_kv_heads: int
    head_dim: int
    max_context: int | None = None
    dtype: str | None = None


def load_model_shape(model: str) -> ModelShape:
    """Read the shape of a model.

    Args:
        model: A folder with a `config.json`, that file itself, or a name on the Hugging Face hub.

    Raises:
        ConfigError: If there is no such config, or its layers' caches are not all of one shape and length.
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
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"The config of model {model!r} can't be read. {_GIVE} (transformers says: {said})"
        ) from error
    return shape_of(config)


def shape_of(config: Any) -> ModelShape:
    """The shape in a transformers config; a model with several parts is asked for its text decoder.

    Raises:
        ConfigError: If an attribute is missing, or the layers' caches are not all of one shape and length.
    """
    kind = config.model_type
    config = config.get_text_config(decoder=True)
    _refuse_other_caches(config, kind)
    num_heads = _number(config, kind, "num_attention_heads")
    # Absent in models without grouped queries; None in configs that were saved so.
    num_kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        num_kv_heads = 1  # Falcon-7B, GPTBigCode
    head_dim = getattr(config, "head_dim", None) or _number(config, kind, "hidden_size") // num_heads
    dtype = getattr(config, "dtype", None)
    return ModelShape(
        layers=_number(config, kind, "num_hidden_layers"),
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=head_dim,
        max_context=getattr(config, "max_position_embeddings", None),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def _number(config: Any, kind: str, name: str) -> int:
    """An attribute that must be there; configs map their own names (GPT-2's `n_layer`) to the common ones."""
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"The config of this {kind} model has no {name}. {_REMEDY}")
    return value


def _refuse_other_caches(config: Any, kind: str) -> None:
    """A plan for layers that keep another cache than one pair a token and head would be silently wrong."""
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if not others and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        others = [f"sliding_window={config.sliding_window}"]
    if getattr(config, "kv_lora_rank", None):
        others = ["kv_lora_rank: multi-head latent attention"]
    if others:
        raise ConfigError(
            f"This {kind} model has layers that don't keep one key and value a token and head ({', '.join(others)});"
            f" the plan knows no others yet. {_REMEDY}"
        )
