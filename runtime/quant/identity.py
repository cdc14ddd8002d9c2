"""`bits=16`: the copy on the device is the cache itself."""

from __future__ import annotations

import torch

from specache_fx.runtime.quant.base import KVKind, Planes, Quantizer


class IdentityQuantizer(Quantizer):
    """Keeps the pairs as they are: one plane, `[batch, num_kv_heads, tokens, head_dim]` of the KV dtype.

    Law 1 (`docs/laws.md`) needs it. It also separates the loss of quantisation from everything else.
    """

    name = "identity"
    valid_bits = (16,)
    exact_constants = ("key", "value")

    @property
    def asked_by(self) -> str:
        """See `Quantizer.asked_by`."""
        return "bits=16"

    def quantize_key(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """A contiguous copy: later writes of the model to x must not reach the cache."""
        self._check_whole_groups(x)
        return (x.clone(memory_format=torch.contiguous_format),)

    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """As `quantize_key`."""
        return self.quantize_key(x)

    def dequantize_key(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The plane itself, without a copy."""
        return planes[0].to(dtype)

    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """As `dequantize_key`."""
        return self.dequantize_key(planes, head_dim, dtype)

    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        """None at all."""
        return planes[0].new_zeros((), dtype=torch.float32)
