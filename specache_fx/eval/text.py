"""Windows of a text, for perplexity while decoding."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from specache_fx.errors import ConfigError
from specache_fx.eval.loading import encode


def read_windows(
    tokenizer: PreTrainedTokenizerBase, file: Path, length: int, num_windows: int, seed: int
) -> torch.Tensor:
    """Stretches of a text that don't overlap, drawn by the seed, each after the tokenizer's first special token.

    Args:
        tokenizer: The model's.
        file: UTF-8 text.
        length: Tokens of a window, the special one included.
        num_windows: How many.
        seed: Of the draw.

    Returns:
        int64 `[num_windows, length]`, in the order of the text.

    Raises:
        ConfigError: If the text can't be read or is too short.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} can't be read as UTF-8 text ({error}). Give a text file, or a name of `specache-fx models`."
        ) from error
    opening = encode(tokenizer, "")
    ids = encode(tokenizer, text)[len(opening) :]
    step = length - len(opening)
    if step < 1:
        raise ConfigError(
            f"length={length}: a window needs more tokens than the {len(opening)} special ones."
        )
    found = len(ids) // step
    if found < num_windows:
        raise ConfigError(
            f"{file} has {len(ids):,} tokens, {found} windows of {length:,}: ask for a smaller length or for fewer than"
            f" {num_windows} prompts."
        )
    starts = sorted(random.Random(seed).sample(range(found), num_windows))
    return torch.tensor([opening + ids[step * start : step * (start + 1)] for start in starts])
