"""Models and tokenizers by name or folder, ours included."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specache_fx.errors import ConfigError
from specache_fx.eval.real import MODELS, model_folder
from specache_fx.sizes import DTYPE_BYTES

OWN_MODELS = ("needle", "suite")
NAMED_MODELS = (*OWN_MODELS, *MODELS)


def own_model_folder(name: str) -> Path:
    """The folder of a model that this project trained: "needle" or "suite"."""
    if name == "needle":
        from specache_fx.examples.needle import MODEL_DIR

        return MODEL_DIR
    try:
        folder = Path(import_module("specache_fx.examples.suite").MODEL_DIR)
    except ImportError as error:
        raise ConfigError(
            'The model "suite" is not in this installation: train it with `python -m'
            " specache_fx.examples.suite.train`, or give --model needle or a transformers model."
        ) from error
    return folder


def load(model: str, device: str, dtype: str) -> tuple[str, PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with its tokenizer.

    Args:
        model: A folder, a name on the hub, or one of `NAMED_MODELS`.
        device: "auto", "cpu" or "cuda".
        dtype: A name of `DTYPE_BYTES`.

    Returns:
        Its folder or name, the model on the device, and the tokenizer.

    Raises:
        ConfigError: If there is no such model, device or dtype.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={dtype!r}: choose one of {', '.join(DTYPE_BYTES)}.")
    place = _device(device)
    folder = model
    if model in NAMED_MODELS:
        folder = str(own_model_folder(model) if model in OWN_MODELS else model_folder(model))
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"There is no folder {model}: give --model the folder of a model, or a name on the hub."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"The model {model!r} can't be loaded ({str(error).strip().splitlines()[0]}). Give a folder of a causal"
            f" language model with its tokenizer, a name on the hub, or one of {', '.join(NAMED_MODELS)}."
        ) from error
    return folder, loaded.eval().to(place), tokenizer


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r}: choose one of auto, cpu, cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('device="cuda": PyTorch finds no CUDA device here. Use device="cpu" or "auto".')
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The tokens of a prompt, special tokens included, unless the text begins with one (a chat template's).

    Raises:
        ConfigError: If the tokenizer has no token for a word.
    """
    first = tokenizer.bos_token
    ready = first is not None and prompt.startswith(str(first))
    try:
        ids: list[int] = tokenizer(prompt, add_special_tokens=not ready, verbose=False).input_ids
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(
            f"The tokenizer has no tokens for a prompt ({error}). Our own models know their own words only: choose"
            " one of their tasks."
        ) from error
    return ids


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer."""
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)
