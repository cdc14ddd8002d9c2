"""Keys by channel; values by token, with each channel brought to a common size before.

Paper: ZipCache (He et al., NeurIPS 2024) §4.1, "channel-separable tokenwise quantization".
"""

from __future__ import annotations

import torch

from specache_fx.runtime.quant.base import KVKind, Planes, saturated
from specache_fx.runtime.quant.kivi import KiviQuantizer


class ZipCacheQuantizer(KiviQuantizer):
    """ZipCache's two layouts: keys are `kivi`'s, values channel-separable by token.

    For values, channel j of a group of tokens is divided by `c_j = sqrt(max |x_j|)`; then each token has one scale
    and one zero for all channels of the head, and c_j is multiplied back after. Planes of values are `(codes, scale,
    zero, c)`: codes as `kivi`'s; scale and zero `[batch, num_kv_heads, tokens, 1]`, c `[batch, num_kv_heads, tokens /
    group_size, head_dim]`, of the KV dtype. c is rounded to it before anything is divided.

    Keys are by channel, as in the paper: the values' method loses five to seven times as much on normal keys with a
    few offset channels after RoPE (a test has them).

    Differences from ZipCache: all tokens have the same width (the paper gives salient ones more bits, by attention
    scores; here the pairs that matter come back at 16 bits instead). A group is `group_size` tokens of one head,
    where the paper normalises over the whole prompt and shares a token's scale among all heads; its parameters
    weigh almost nothing then. Here values have `head_dim + 2 * group_size` parameters a group: as many as `kivi`'s
    where `head_dim` is twice `group_size`, fewer above that, more below. 1 bit has the zero and scale of SpeCache's
    eq. 3.

    A value comes back within half its token's scale times c_j; of a group of equal numbers, up to two roundings.

    Bits per value at head_dim 128, group_size 64: the code's and 0.5, for keys and for values.
    """

    name = "zipcache"
    code_form = None
    exact_constants = ("key",)

    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_value`."""
        self._check_whole_groups(x)
        groups = x.unflatten(2, (x.shape[2] // self.group_size, self.group_size))
        # In float64: torch's float32 root is not always the nearest number, nor surely the same one in a longer row.
        sizes, counted = groups.abs(), self._counted(real)
        if counted is not None:
            sizes = sizes.masked_fill(~counted[:, None, :, :, None], 0)
        size = sizes.amax(3).double().sqrt().to(x.dtype)
        divisor = torch.where(size == 0, 1.0, size.float())
        planes = self._quantize_by_token((groups.float() / divisor.unsqueeze(3)).flatten(2, 3), x.dtype)
        return (*planes, size)

    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantizer.dequantize_value`."""
        x = super().dequantize_value(planes[:3], head_dim, torch.float32)
        size = planes[3].float().unsqueeze(3)
        return saturated((x.unflatten(2, (size.shape[2], self.group_size)) * size).flatten(2, 3), dtype)

    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        """`Quantizer.error_bound`: half a token's scale, times the channel's size."""
        bound = super().error_bound(planes[:3], head_dim, kind)
        if kind == "key":
            return bound
        return bound * planes[3].float().repeat_interleave(self.group_size, dim=2)

    def _channels(self, head_dim: int) -> int:
        return head_dim  # one scale and zero for a token, whatever group_size is
