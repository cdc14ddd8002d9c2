"""From a GGUF file to a folder that transformers loads: weights, configs, tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from specache_fx.errors import ConfigError


def convert(gguf: Path, folder: Path) -> None:
    """Read a GGUF file and save its model and tokenizer, weights in bfloat16.

    Args:
        gguf: The file.
        folder: To save to; made here.

    Raises:
        ConfigError: If the package that reads GGUF is not installed, or the file can't be read.
    """
    # Where the package `kernels` is installed, weights would stay packed otherwise. Older releases always unpack them.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)}
        if hasattr(transformers, "GgufConfig")
        else {}
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **unpack
        )
    except ImportError as error:
        raise ConfigError(
            "To read GGUF files transformers needs the package gguf: pip install 'specache-fx[eval]'."
        ) from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{gguf.name} can't be read as GGUF ({error}).") from error
    config = copy.deepcopy(read.config)
    # The weights are plain numbers now, but the config says otherwise, and such a model is not saved.
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
