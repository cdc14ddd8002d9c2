"""What a session counts of its tokens: at once or later, the same."""

from __future__ import annotations

import pytest
import torch

from specache_fx.runtime import metrics
from specache_fx.runtime.metrics import Metrics


@pytest.mark.parametrize("keep_steps", [False, True])
def test_tokens_are_counted_whenever_somebody_asks(keep_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_BLOCK_STEPS", 3)
    counted = Metrics(torch.device("cpu"), keep_steps=keep_steps)
    generator = torch.Generator().manual_seed(0)
    hits = checks = needed = 0
    for step in range(11):
        missed = torch.rand(4, generator=generator) < 0.5
        counted.count_token(missed)  # of a step that broke off
        counted.step_counts().add_(7)
        counted.begin_step()
        if step % 4 != 1:  # a step without a guess
            counted.count_token(missed)
            hits, checks = hits + int((~missed).sum()), checks + 4
        if step % 3 != 2:  # a step of a layer that has nothing quantised yet
            counted.step_counts()[1] += step
            needed += step
        counted.end_step(step)
        for _ in range(2):
            assert (counted.hits.token_hits, counted.hits.token_checks) == (hits, checks)
            assert (counted.hits.topk_hits, counted.hits.topk_needed) == (0, needed)
    assert counted.steps == 11
    assert len(counted.series()) == (11 if keep_steps else 0)
