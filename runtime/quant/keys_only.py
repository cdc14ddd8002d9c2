"""`policy="kcache"`: the keys as they are, and of the values nothing."""

from __future__ import annotations

import torch

from specache_fx.runtime.quant.base import KVKind, Planes
from specache_fx.runtime.quant.identity import IdentityQuantizer


class KeysOnlyQuantizer(IdentityQuantizer):
    """Keeps keys exactly; a value comes back as 0, so that a pair whose value isn't staged adds nothing.

    A value's plane is `[batch, num_kv_heads, tokens, 0]`: it says how many there are. No method that a user names:
    what it takes away has to be on the host.

    Paper: KCache §3.1 (K stays in device memory, V goes to the host).
    """

    name = "keys_only"

    @property
    def asked_by(self) -> str:
        """See `Quantizer.asked_by`."""
        return "policy='kcache'"

    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """Planes without bytes."""
        self._check_whole_groups(x)
        return (x.new_empty((*x.shape[:3], 0)),)

    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros."""
        return planes[0].new_zeros((*planes[0].shape[:3], head_dim), dtype=dtype)

    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        """None for keys; the error of a value has no bound."""
        bound = super().error_bound(planes, head_dim, kind)
        return bound if kind == "key" else bound.fill_(torch.inf)
