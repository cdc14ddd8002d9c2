"""The ways of keeping a cache that are measured: whole on the device, and this package's sessions."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.decoder import Cache
from benchmarks.gpu.shapes import ModelShape
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.decode_step import DecodeStep
from specache_fx.runtime.device_steps import DeviceSteps
from specache_fx.runtime.layer_cache import LayerCache
from specache_fx.runtime.layout import LayerShape
from specache_fx.runtime.session import Session

ROOM = 256  # tokens that may be decoded


class FullCache:
    """All pairs at 16 bits in buffers that are made once, and FlashAttention through SDPA."""

    lanes = 1

    def __init__(
        self, shape: ModelShape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        size = (batch, shape.num_kv_heads, tokens + ROOM, shape.head_dim)
        self._pairs = [
            [torch.empty(size, dtype=dtype, device=device).normal_() for _ in range(2)]
            for _ in range(shape.num_layers)
        ]
        self._length = tokens
        self._flash = device.type == "cuda"

    def begin(self) -> None:
        """Nothing to prepare."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write the pair, attend to all."""
        end = self._length + 1
        keys, values = self._pairs[layer]
        keys[:, :, self._length : end], values[:, :, self._length : end] = key[0], value[0]
        backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self._flash else contextlib.nullcontext()
        with backend:
            out = F.scaled_dot_product_attention(
                query[0], keys[:, :, :end], values[:, :, :end], enable_gqa=True
            )
        return out[None]

    def end(self) -> None:
        """One token more."""
        self._length += 1

    def num_quantized(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """Drop the buffers."""
        self._pairs = []


class SessionCache:
    """A session filled with random pairs layer by layer, as a prompt fills it, and run as a decode graph runs it."""

    def __init__(
        self,
        config: SpecacheConfig,
        shape: ModelShape,
        batch: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        synchronous: bool = False,
    ) -> None:
        layers = (LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim),) * shape.num_layers
        self.session = Session(config, layers, dtype, device)
        self.lanes, self._scale = config.num_lanes, shape.head_dim**-0.5
        size = (batch, shape.num_kv_heads, tokens, shape.head_dim)
        try:
            with torch.inference_mode():
                for layer in range(shape.num_layers):
                    key, value = (torch.empty(size, dtype=dtype, device=device).normal_() for _ in range(2))
                    self.session.store(layer, key, value, None)
        except BaseException:
            self.session.close()
            raise
        self.session.advance(tokens, decoded=False)
        if self.session.transfer is not None:
            self.session.transfer.synchronous = synchronous
        self._by_device = isinstance(self.session.steps, DeviceSteps)
        self._running = contextlib.ExitStack()
        self._step = DecodeStep(self.session)

    def begin(self) -> None:
        """A step of its own."""
        self._step = DecodeStep(self.session, whole=tuple(self.session.tiered) if self._by_device else ())
        self._running.enter_context(self._step.running())

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What a decode graph calls: one operator, or all in their order."""
        if self._by_device:
            run = torch.ops.specache.device_step.default
            return run(query, key, value, self.session.state, layer, self._scale)  # type: ignore[no-any-return]
        return self._step.by_operators(layer, query, key, value, self._scale)

    def end(self) -> None:
        """One token more."""
        self._running.close()
        self.session.advance(1, decoded=True)

    def num_quantized(self) -> int:
        """Of the first layer; all have as many."""
        layer = self.session.layers[0]
        assert isinstance(layer, LayerCache)
        return layer.num_quantized

    def close(self) -> None:
        """Free every tier."""
        self.session.close()


METHODS: dict[str, SpecacheConfig | None] = {
    "full": None,
    "kivi-2": SpecacheConfig(policy="kivi", bits=2),
    "specache-2": SpecacheConfig(bits=2),
    "specache-1": SpecacheConfig(bits=1),
}


def make_cache(
    method: str,
    shape: ModelShape,
    batch: int,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    synchronous: bool = False,
) -> Cache:
    """A cache by its name in `METHODS`, holding `tokens` tokens of `batch` sequences."""
    config = METHODS[method]
    if config is None:
        return FullCache(shape, batch, tokens, device, dtype)
    return SessionCache(config, shape, batch, tokens, device, dtype, synchronous)
