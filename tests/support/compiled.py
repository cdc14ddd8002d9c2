"""A `TinyDecoder` compiled for a law, tokens to feed it, and its run beside the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from support import strategies
from support.growing_decoder import Growing
from support.models import Generated, TinyDecoder, generate
from support.open_sessions import session_of
from support.oracle import OracleDecoder
from support.oracle_records import OracleRun

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.session.session import Session

# Compiled float32 against eager float32: the order of sums differs, nothing else.
EXACT = {"rtol": 2e-4, "atol": 2e-4}


def compiled(model: TinyDecoder, config: SpecacheConfig, *, untraced: bool = False) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {**asdict(config), "lowering": "eager"}
    # A latent's session begins at the first step.
    if untraced and model.config.latent_dim is None and config.placement.offload:
        return Growing(model, **options, prompts="untraced")
    return torch.compile(model, backend="specache", options=options)


def forced_tokens(prompt: strategies.Prompt, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        prompt.model.config.vocab_size, (len(prompt.input_ids), tokens - 1), generator=generator
    )


def run(
    prompt: strategies.Prompt, config: SpecacheConfig, tokens: int, forced: torch.Tensor | None = None
) -> Generated:
    return generate(
        compiled(prompt.model, config, untraced=prompt.untraced),
        prompt.input_ids,
        tokens,
        prompt.attention_mask,
        forced,
    )


def assert_plain(prompt: strategies.Prompt, config: SpecacheConfig, tokens: int = 12) -> None:
    """Exact options give what the uncompiled model gives."""
    plain = generate(prompt.model, prompt.input_ids, tokens, prompt.attention_mask)
    ours = run(prompt, config, tokens, forced=plain.tokens[:, :-1])
    torch.testing.assert_close(ours.logits, plain.logits, **EXACT)
    assert torch.equal(ours.tokens, plain.tokens)


def assert_oracles(
    prompt: strategies.Prompt,
    config: SpecacheConfig,
    tokens: int,
    forced: torch.Tensor | None,
    guessed: torch.Tensor | None = None,
) -> tuple[OracleRun, Generated, Session]:
    """Logits are the dense oracle's: its run, ours, and our session. See `OracleDecoder.generate` for `guessed`."""
    truth = OracleDecoder(prompt.model, config).generate(
        prompt.input_ids, tokens, prompt.attention_mask, forced, guessed
    )
    ours = run(prompt, config, tokens, torch.stack([step.token for step in truth.steps], dim=1))
    torch.testing.assert_close(ours.logits, truth.logits, **EXACT)
    session = session_of(ours.past)
    return truth, ours, session
