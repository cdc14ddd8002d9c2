"""Masks over a whole buffer: what they show behind the tokens."""

from __future__ import annotations

import pytest
import torch

from specache_fx.capture.caches.buffers import shows_behind

LENGTH, KV_LEN = 32, 20


@pytest.mark.parametrize("hidden", [False, -1e4, torch.finfo(torch.float32).min])
def test_a_mask_shows_what_it_does_not_hide(hidden: float) -> None:
    mask = torch.full((2, 1, 1, LENGTH), hidden)
    mask = mask.bool() if hidden is False else mask
    mask[..., :KV_LEN] = hidden is False
    assert not shows_behind(mask, torch.tensor(KV_LEN))
    mask[1, 0, 0, KV_LEN] = True if hidden is False else -1.0
    assert shows_behind(mask, torch.tensor(KV_LEN))
    assert not shows_behind(mask, torch.tensor(KV_LEN + 1))
