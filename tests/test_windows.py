"""Caches of other shapes: sliding windows, chunks and layers that share KV answer as eager does, in both lanes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from support.zoo import SMALL, WINDOW, WINDOWED_NAMES, build, left_padded
from torch import Tensor

from specache_fx import runners
from specache_fx.runtime.session import Session

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 40
SHORT, LONG = (8, 12), (15, 21)  # prompts of a window's tokens at most, and of more
OPTIONS: dict[str, Any] = {**SMALL, "top_k": 128, "strict": True}
SHARED = ("gemma3n_text", "gemma4_text")


def generate(model: Any, lengths: tuple[int, ...], steps: int = STEPS, **kwargs: Any) -> Any:
    return model.generate(
        **left_padded(lengths),
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


@cache
def eager(name: str, lengths: tuple[int, ...]) -> Any:
    return generate(build(name), lengths)


def distance(seen: Tensor, expected: Tensor) -> float:
    return float((seen - expected).abs().max() / expected.abs().max())


@dataclass
class Lanes:
    """Feeds lane 1 with the true next token and keeps its logits, step by step."""

    truth: Tensor  # [batch, tokens]
    kv_len: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step, lower = runners.Decode._step, runners.lower_static

        def forced(runner: runners.Decode, session: Session, args: Any, ahead: int) -> Any:
            if ahead and runner._state.lanes > 1 and session.kv_len + 1 < self.truth.shape[1]:
                session.speculative_token = self.truth[:, session.kv_len + 1, None]
            out = step(runner, session, args, ahead)
            if ahead and runner._window_ahead and runner._state.lanes > 1:
                self.kv_len.append(session.kv_len)
                self.logits.append(self.last)
            return out

        def kept(*args: Any) -> Any:
            compiled = lower(*args)

            def run(*inputs: Tensor) -> Any:
                results = compiled(*inputs)
                self.last = next(
                    result for result in results if result.shape[-1] == 128 and result.dim() == 4
                )[1]
                return results

            return run

        monkeypatch.setattr(runners.Decode, "_step", forced)
        if self.truth.numel():
            monkeypatch.setattr(runners, "lower_static", kept)


@pytest.mark.parametrize("bits", [16, 1])
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", WINDOWED_NAMES)
def test_tokens_and_logits_of_both_lanes_equal_eager(
    name: str, lengths: tuple[int, ...], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = eager(name, lengths)
    lanes = Lanes(expected.sequences)
    if name != "mistral-window":
        lanes.watch(monkeypatch)
    model = build(name)
    model.compile(backend="specache", options={**OPTIONS, "bits": bits})
    out = generate(model, lengths)
    assert torch.equal(out.sequences, expected.sequences)
    logits = torch.stack(expected.logits)  # [steps, batch, vocabulary]
    assert distance(torch.stack(out.logits), logits) < 1e-4
    if name == "mistral-window":  # nothing is selected where every layer keeps a window: one lane
        return
    prompt_len = max(lengths)
    ahead = [
        distance(seen[:, 0], logits[kv_len - prompt_len + 2])
        for kv_len, seen in zip(lanes.kv_len, lanes.logits, strict=True)
        if kv_len - prompt_len + 2 < STEPS
    ]
    assert max(ahead) < 1e-4
    # Lane 1 is void in one step alone: the one that fills the window.
    assert len(ahead) == STEPS - 2 - (prompt_len < WINDOW)
