"""TurboQuant's codes of one width for keys and another for values: tried here, no option of the backend."""

from __future__ import annotations

import torch

from specache_fx.runtime.quant import QUANTIZERS, KVKind, Planes, Quantizer
from specache_fx.runtime.quant.turboquant import TurboQuantizer


class _Mixed(Quantizer):
    valid_bits = (2,)
    sequence_key_planes = 1
    key_bits: int
    value_bits: int

    def __init__(self, bits: int, group_size: int) -> None:
        super().__init__(bits, group_size)
        self._key, self._value = (TurboQuantizer(n, group_size) for n in (self.key_bits, self.value_bits))

    def quantize_key(self, x: torch.Tensor) -> Planes:
        return self._key.quantize_key(x)

    def quantize_more_keys(self, x: torch.Tensor, held: Planes, real: torch.Tensor | None = None) -> Planes:
        return self._key.quantize_more_keys(x, held, real)

    def quantize_value(self, x: torch.Tensor) -> Planes:
        return self._value.quantize_value(x)

    def dequantize_key(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return self._key.dequantize_key(planes, head_dim, dtype)

    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return self._value.dequantize_value(planes, head_dim, dtype)

    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        return self._of(kind).error_bound(planes, head_dim, kind)

    def _of(self, kind: KVKind) -> Quantizer:
        return self._key if kind == "key" else self._value


class _K2V1(_Mixed):
    name, key_bits, value_bits = "turboquant-k2v1", 2, 1


class _K1V2(_Mixed):
    name, key_bits, value_bits = "turboquant-k1v2", 1, 2


def register() -> None:
    """Have `quantizer="turboquant-k2v1"` and `"turboquant-k1v2"`."""
    QUANTIZERS.update({made.name: made for made in (_K2V1, _K1V2)})
