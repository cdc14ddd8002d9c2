"""A model whose layers are on several devices (`device_map`), in one graph: it is left alone, by name."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import specache_fx


class TwoDevices(nn.Module):
    """Two attentions with a cache each, the second on "meta", which is no other GPU but another device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 3 * 32)
        self.second = nn.Linear(32, 3 * 32, device="meta")

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        caches: list[Tensor] = []
        for layer in (self.first, self.second):
            batch, tokens, _ = x.shape
            q, k, v = layer(x.to(layer.weight.device)).view(batch, tokens, 3, 4, 8).permute(2, 0, 3, 1, 4)
            x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            caches += [k, v]
        return x, tuple(caches)


@torch.no_grad()
def test_caches_on_two_devices_are_left_alone_and_named(caplog):
    model = TwoDevices()
    specache_fx.compile(model, lowering="eager")
    with caplog.at_level(logging.WARNING):
        out, caches = model(torch.randn(1, 7, 32))
    assert out.device.type == "meta" and caches[0].device.type == "cpu"
    assert "its KV caches are on 2 devices (cpu, meta): a session lives on one" in caplog.text
    assert "Load the model on one device, as with device_map={'': 0}" in caplog.text


@torch.no_grad()
def test_strict_refuses_caches_on_two_devices():
    model = TwoDevices()
    specache_fx.compile(model, lowering="eager", strict=True)
    with pytest.raises(BackendCompilerFailed, match=r"UnsupportedGraphError: .* on 2 devices \(cpu, meta\)"):
        model(torch.randn(1, 7, 32))
