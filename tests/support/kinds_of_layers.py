"""Two sessions with a layer of each kind: one is stepped by operators, the other by one operator a layer."""

from __future__ import annotations

from typing import Any

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.runtime import ops, registry  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.decode_step import DecodeStep
from specache_fx.runtime.layout import LayerShape
from specache_fx.runtime.masks import WindowMask
from specache_fx.runtime.session import Session

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
RESIDENT, CODED = 2, 4
WINDOWS = {0: 7, 1: 30, 3: 7}


class Kinds:
    """Layers: a short window, a long one that isn't full, a resident one, a window as the first, one with codes.

    Args:
        device: Of the sessions.
        whole: The operator that steps a layer.
        tokens: Of the prompt.
        padding: Tokens of the first batch row that are none.
        options: See `SpecacheConfig`.
    """

    def __init__(
        self, device: torch.device, whole: Any, tokens: int, padding: int = 0, **options: Any
    ) -> None:
        self._device, self._whole = device, whole
        self._generator = torch.Generator().manual_seed(0)
        shapes = tuple(LayerShape(KV_HEADS, DIM, DIM, WINDOWS.get(layer)) for layer in range(5))
        config = SpecacheConfig(group_size=4, residual_length=3, top_k=5, resident_layers=1, **options)
        self.sessions = [Session(config, shapes, torch.float32, device) for _ in range(2)]
        self.real = torch.ones(BATCH, tokens, dtype=torch.bool, device=device)
        self.real[0, :padding] = False
        for layer in range(5):
            key, value = self.pair(tokens)
            for session in self.sessions:
                session.store(layer, key, value, self.real[:, None])
        for session in self.sessions:
            session.advance(tokens, decoded=False)
        assert list(self.sessions[0].tiered) == [CODED]
        self.selects = config.placement.prefetch
        if self.selects:
            self.step(predecode=True)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device)

    def pair(self, tokens: int, *lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*lanes, BATCH, KV_HEADS, tokens, DIM)
        return self.random(*shape), self.random(*shape)

    def masks(self, lanes: int, ahead: int) -> dict[int, tuple[WindowMask | None, ...]]:
        """What the model would say of its windows: padding is hidden in them too."""
        told = {}
        for window in set(WINDOWS.values()):
            rows = []
            for lane in range(lanes):
                seen = torch.cat([self.real, self.real.new_ones(BATCH, 1 + lane * ahead)], 1)[:, -window:]
                rows.append(WindowMask(seen.shape[1], seen, None))
            told[window] = tuple(rows)
        return {layer: told[window] for layer, window in WINDOWS.items()}

    def step(self, lanes: int = 2, predecode: bool = False, masked: bool = False) -> None:
        """One step of both; of one lane where nothing is selected."""
        lanes = lanes if self.selects else 1
        masks = self.masks(lanes, 0 if predecode else 1) if masked else {}
        by_ops, in_one = (
            DecodeStep(session, predecode, each, lanes=lanes, window_masks=masks)
            for session, each in zip(self.sessions, ((), tuple(range(5))), strict=True)
        )
        with in_one.running():
            for layer in range(5):
                query = self.random(lanes, BATCH, HEADS, 1, DIM)
                key, value = self.pair(1, lanes)
                state = self.sessions[1].state
                out = self._whole(query.clone(), key.clone(), value.clone(), state, layer, 0.3)
                selects = self.selects and layer == CODED
                by_ops.wait_prefetch(layer) if selects else None
                wanted = by_ops.attend(layer, query, key, value, 0.3, selects)
                by_ops.append(layer, key[0], value[0])
                if selects:
                    by_ops.prefetch(layer, by_ops.select(layer))
                torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        for layer in range(5):
            ours, theirs = (session.layers[layer] for session in self.sessions)
            assert ours.kv_len == theirs.kv_len
            for x, y in zip(ours.history(), theirs.history(), strict=True):
                assert torch.equal(x, y)
        transfers = [session.transfer for session in self.sessions if session.transfer is not None]
        assert len(transfers) == 2 * self.selects
        if self.selects:
            assert torch.equal(*(transfer.wait(CODED)[1] for transfer in transfers))
        if not predecode:
            self.real = torch.cat([self.real, self.real.new_ones(BATCH, 1)], 1)
            for session in self.sessions:
                session.advance(1, decoded=True)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
