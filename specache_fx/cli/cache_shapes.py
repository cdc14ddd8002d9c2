"""The shapes of a transformers model's KV cache: those of the tensors that the model makes when it runs.

It runs on fake tensors, which have shapes and no numbers: a model of any size takes seconds and no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from specache_fx.calls.known_caches import filled, grows, shape_of, states_of
from specache_fx.errors import ConfigError, first_line
from specache_fx.runtime.layers.layout import LayerShape

_GIVE = "Give a folder with a config.json, or the name of a model on the Hugging Face hub."
_REMEDY = "Give --layers, --kv-heads and --head-dim instead of --model."


def load_config(model: str) -> Any:
    """Read a model's config.

    Args:
        model: A folder with a `config.json`, that file itself, or a name on the Hugging Face hub.

    Raises:
        ConfigError: If there is none.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"The folder {model!r} has no config.json. {_GIVE}")
    # A name on the hub is "name" or "owner/name".
    if not path.exists() and (path.is_absolute() or len(path.parts) > 2 or model.startswith((".", "~"))):
        raise ConfigError(f"There is no file or folder {model!r}. {_GIVE}")
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The config of model {model!r} can't be read. {_GIVE} (transformers says: {first_line(error)})"
        ) from error


class _Zeros(TorchDispatchMode):
    """Reads 0 where a model asks for a number, as for the largest position, by which long contexts scale theirs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return 0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def cache_shapes(config: Any) -> tuple[list[LayerShape], str]:
    """The layers of a model's cache that have pairs of their own, and the cache's dtype (bfloat16 by default).

    Raises:
        ConfigError: If the model doesn't run on tokens alone, or keeps more than a key and a value for each token and
            head: a plan without that would be silently wrong.
    """
    text = config.get_text_config(decoder=True)  # of a model with several parts
    known = [each for each in (text, config) if type(each) in MODEL_FOR_CAUSAL_LM_MAPPING]
    auto = AutoModelForCausalLM if known else AutoModel
    try:
        with FakeTensorMode(), _Zeros(), torch.no_grad():
            model = auto.from_config((*known, text)[0], dtype=text.dtype or torch.bfloat16).eval()
            model.set_experts_implementation("batched_mm")  # others choose sizes by numbers
            cache = model(torch.zeros(1, 2, dtype=torch.long), use_cache=True).past_key_values
    except Exception as error:  # whatever a model's own code raises
        raise ConfigError(
            f"This {config.model_type} model doesn't run on shapes alone ({type(error).__name__}: {first_line(error)})."
            f" {_REMEDY}"
        ) from error
    layers = filled(cache) if grows(cache) else []
    if not layers or any(any(states_of(each)) for each in cache.layers):
        kinds = sorted({type(each).__name__ for each in getattr(cache, "layers", ())})
        raise ConfigError(
            f"This {config.model_type} model doesn't keep one key and value a token and head"
            f" ({', '.join(kinds) or 'no cache'}); the plan knows no others yet. {_REMEDY}"
        )
    return [_of_latent(shape_of(each), text) for each in layers], str(layers[0].keys.dtype).removeprefix(
        "torch."
    )


def _of_latent(shape: LayerShape, config: Any) -> LayerShape:
    """The shape as the backend has it: of latent attention (MLA) the rotated key, and the latent as the value."""
    if shape.key_dim != getattr(config, "kv_lora_rank", None):
        return shape
    return shape._replace(key_dim=shape.value_dim, value_dim=shape.key_dim)
