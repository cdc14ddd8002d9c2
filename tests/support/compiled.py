"""A `TinyDecoder` compiled for a law, and tokens to feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from support import strategies
from support.models import TinyDecoder

from specache_fx.config import SpecacheConfig

# Compiled float32 against eager float32: the order of sums differs, nothing else.
EXACT = {"rtol": 2e-4, "atol": 2e-4}


def compiled(model: TinyDecoder, config: SpecacheConfig) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {**asdict(config), "lowering": "eager"}
    return torch.compile(model, backend="specache", options=options)


def forced_tokens(prompt: strategies.Prompt, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        prompt.model.config.vocab_size, (len(prompt.input_ids), tokens - 1), generator=generator
    )
