"""Two sessions of the same tokens: one is stepped by operators, the other by one operator a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.strategies import AttentionShape
from torch import Tensor

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.layers.masks import WindowMask
from specache_fx.runtime.session import registry  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.session.decode_step import DecodeStep
from specache_fx.runtime.session.session import Session

Own = tuple[Tensor, Tensor, Tensor]
not_served = pytest.mark.parametrize(
    "options",
    [
        {"sink_tokens": 2},
        {"kernel": "reference"},
        {"host": "disk"},
        {"quantizer": "nuq"},
    ],
    ids=lambda options: next(iter(options)),
)


def laid_out(own: Own, layout: str) -> Own:
    """The same numbers as a model may have them in memory."""
    if layout == "turned":  # batch rows come last
        return tuple(x.transpose(1, 4).contiguous().transpose(1, 4) for x in own)  # type: ignore[return-value]
    if layout == "fused":  # parts of one projection
        rows = [x.transpose(2, 3).flatten(3) for x in own]
        parts = torch.cat(rows, -1).split([row.shape[-1] for row in rows], -1)
        return tuple(  # type: ignore[return-value]
            part.unflatten(-1, (x.shape[2], -1)).transpose(2, 3) for x, part in zip(own, parts, strict=True)
        )
    return own


class Twins:
    """Args: the operator, options, sizes, the prompt's tokens, how near results are (None: the same bits), windows."""

    def __init__(
        self,
        whole: Callable[..., Any],
        config: SpecacheConfig,
        shape: AttentionShape,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        layers: int = 1,
        padding: int = 0,
        device: torch.device | str = "cpu",
        close: dict[str, float] | None = None,
        windows: dict[int, int] | None = None,
    ) -> None:
        self._whole, self._close, self._device = whole, close, torch.device(device)
        config = config.for_device(self._device.type)
        self.shape, self.dtype, self.layers = shape, dtype, layers
        self.generator = torch.Generator().manual_seed(0)
        self.given: Own | list[Tensor] = []  # what the operator got last
        self.windows = windows or {}  # by layer
        sizes = (shape.num_kv_heads, shape.head_dim, shape.value_dim)
        shapes = tuple(LayerShape(*sizes, self.windows.get(layer)) for layer in range(layers))
        self.sessions = [Session(config, shapes, dtype, self._device) for _ in range(2)]
        self.real = torch.ones(shape.batch, tokens, dtype=torch.bool, device=device)  # no padding
        self.real[1:, :padding] = False
        for layer in range(layers):
            key, value = self.pair(tokens)
            for session in self.sessions:
                session.store(layer, key, value, self.real[:, None] if padding else None)
        for session in self.sessions:
            session.advance(tokens, decoded=False)
        self.selects = config.stages
        if self.selects and config.lookahead != "none":
            self.step(predecode=True)

    def random(self, heads: int, tokens: int, dim: int, *lanes: int) -> Tensor:
        shape = (*lanes, self.shape.batch, heads, tokens, dim)
        return torch.randn(shape, generator=self.generator).to(self._device, self.dtype)

    def pair(self, tokens: int, *lanes: int) -> tuple[Tensor, Tensor]:
        heads, dims = self.shape.num_kv_heads, (self.shape.head_dim, self.shape.value_dim)
        return self.random(heads, tokens, dims[0], *lanes), self.random(heads, tokens, dims[1], *lanes)

    def own(self, lanes: int) -> Own:
        """Query, key and value of each lane's token."""
        return (self.random(self.shape.num_heads, 1, self.shape.head_dim, lanes), *self.pair(1, lanes))

    def in_one(self, own: Own, layer: int = 0, scale: float = 0.3, **form: Any) -> Tensor:
        """The second session's layer by one operator."""
        out = self._whole(*own, self.sessions[1].state, layer, scale, form.get("softcap"), form.get("sinks"))
        assert isinstance(out, Tensor)
        return out

    def step(
        self,
        lanes: int = 2,
        predecode: bool = False,
        layout: str = "",
        told: dict[str, Any] | None = None,
        scale: float = 0.3,
        **form: Any,
    ) -> None:
        """One step of both; `told` goes to `DecodeStep`."""
        whole = tuple(range(self.layers))
        by_ops, in_one = (
            DecodeStep(session, predecode, each, **{"lanes": lanes, **(told or {})})
            for session, each in zip(self.sessions, ((), whole), strict=True)
        )
        with in_one.running():
            for layer in whole:
                query, key, value = own = laid_out(self.own(lanes), layout)
                self.given = own if layout else [side.clone() for side in own]
                out = self.in_one(self.given, layer, scale, **form)  # type: ignore[arg-type]
                wanted = by_ops.by_operators(
                    layer, query, key, value, scale, form.get("softcap"), form.get("sinks")
                )
                torch.testing.assert_close(out, wanted, **(self._close or {"rtol": 0, "atol": 0}))
        for layer in whole:
            ours, theirs = (session.layers[layer] for session in self.sessions)
            assert ours.kv_len == theirs.kv_len
            for x, y in zip(*(self.state(session, layer) for session in self.sessions), strict=True):
                assert torch.equal(x, y)
        if not predecode:
            self.real = torch.cat([self.real, self.real.new_ones(len(self.real), 1)], 1)
            for session in self.sessions:
                session.advance(1, decoded=True)
            hits = [tuple(session.metrics.hits) for session in self.sessions]
            read = [None if session.host is None else session.host.num_read for session in self.sessions]
            assert read[0] is None or torch.equal(read[0], read[1])
            torch.testing.assert_close(*hits, **(self._close or {"rtol": 0, "atol": 0}))

    def state(self, session: Session, layer: int = 0) -> list[Tensor]:
        """What a layer holds, and what is staged of it."""
        held, transfer = list(session.load(layer)), session.transfer
        assert (transfer is not None) == self.selects
        if transfer is None or layer not in session.tiered:
            return held
        rows, indices = transfer.wait(layer)
        window = session.tiered[layer].window()
        return [*window, *held, rows[indices >= 0], indices, transfer.staging(layer).wanted]

    def close(self) -> None:
        for session in self.sessions:
            session.close()


class Kinds(Twins):
    """Layers: a short window, a long one that isn't full, a resident one, a window as the first, one with codes.

    Args: the operator, the prompt's tokens, padding of the second batch row, the device and options.
    """

    def __init__(
        self, whole: Callable[..., Any], tokens: int, padding: int, device: torch.device, **options: Any
    ) -> None:
        small = {"group_size": 4, "residual_length": 3, "top_k": 5, "resident_layers": 1}
        config = SpecacheConfig(**{"lookahead": "token", **small, **options})
        super().__init__(
            whole,
            config,
            AttentionShape(2, 4, 2, 16, 16),
            tokens,
            layers=5,
            padding=padding,
            device=device,
            close={"rtol": 1e-4, "atol": 1e-5},
            windows={0: 7, 1: 30, 3: 7},
        )
        assert list(self.sessions[0].tiered) == [4]

    def masked_step(self, lanes: int = 2, masked: bool = True) -> None:
        """One step, of one lane where nothing is selected, with what the model would say of its windows."""
        lanes, told = lanes if self.selects else 1, {}
        for window in set(self.windows.values()):
            seen = [
                torch.cat([self.real, self.real.new_ones(2, 1 + lane)], 1)[:, -window:]
                for lane in range(lanes)
            ]
            told[window] = tuple(WindowMask(each.shape[1], each, None) for each in seen)
        masks = {layer: told[window] for layer, window in self.windows.items()} if masked else {}
        self.step(lanes, told={"window_masks": masks})
