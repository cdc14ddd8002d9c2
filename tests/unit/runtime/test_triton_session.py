"""Whole decode steps of a session with Triton's kernels, beside the same steps with the reference kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.triton_mode import DEVICE, needs_triton

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.transfer import choose_transfer

pytestmark = [needs_triton, pytest.mark.gpu]
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
# One layer that keeps all tokens, and one that keeps a window: other masks, no codes.
SHAPES = (LayerShape(KV_HEADS, DIM, DIM), LayerShape(KV_HEADS, DIM, DIM, window=12))


def make_session(kernel: str, prompt: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor) -> Session:
    sizes = {"bits": 2, "group_size": 8, "residual_length": 6, "top_k": 5}
    config = SpecacheConfig(lookahead="token", kernel=kernel, **sizes)  # type: ignore[arg-type]
    session = Session(config, SHAPES, torch.float32, DEVICE)
    for layer, (key, value) in enumerate(prompt):
        session.store(layer, key, value, mask)
    session.advance(prompt[0][0].shape[2], decoded=False)
    if kernel == "triton":
        assert session.host is not None
        session.transfer = choose_transfer(session.host, config.top_k, DEVICE, interpreted=True)
    return session


def test_steps_equal_the_reference_kernels_while_groups_fill():
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    prompt = [(random(BATCH, KV_HEADS, 28, DIM), random(BATCH, KV_HEADS, 28, DIM)) for _ in SHAPES]
    mask = torch.ones(BATCH, 1, 28, dtype=torch.bool, device=DEVICE)
    mask[1, :, :5] = False
    sessions = [make_session(kernel, prompt, mask) for kernel in ("reference", "triton")]
    quantized = set()
    for number in range(5):
        predecode = number == 0
        steps = [DecodeStep(session, predecode) for session in sessions]
        for layer in range(len(SHAPES)):
            query = random(2, BATCH, HEADS, 1, DIM)
            key, value = random(2, BATCH, KV_HEADS, 1, DIM), random(2, BATCH, KV_HEADS, 1, DIM)
            outs, chosen = [], []
            for step in steps:
                if layer == 0:
                    step.wait_prefetch(layer)
                outs.append(step.attend(layer, query, key, value, 0.25, staged=not predecode))
                step.append(layer, key[0], value[0])
                if layer == 0:
                    chosen.append(step.select(layer))
                    step.prefetch(layer, chosen[-1])
            torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)
            if chosen:
                assert torch.equal(chosen[0], chosen[1])
        if not predecode:
            for session in sessions:
                session.advance(1, decoded=True)
        quantized.add(sessions[0].layers[0].num_quantized)
    assert len(quantized) == 2  # a group filled on the way
    for session in sessions:
        session.settle()
    fetched = [session.transfer.metrics for session in sessions]
    # The device doesn't say how long its copies took, and leaves none to a product.
    times = {"copy_seconds": 0.0, "waited_seconds": 0.0}
    assert replace(fetched[0], **times) == replace(fetched[1], **times)
    assert fetched[0].reused_rows > 0
    for session in sessions:
        session.close()
