"""Codes of rotated, centred keys and values that keep each token's norm.

Paper: TurboQuant (Zandieh et al., 2025), in its spirit: a rotation, levels for normal numbers, a norm for each token.
"""

from __future__ import annotations

import torch

from specache_fx.runtime.quant import on_cpu
from specache_fx.runtime.quant.base import CODE_ERROR, KVKind, Planes, Quantizer, saturated
from specache_fx.runtime.quant.hadamard import block_size, rotate, rotate_back
from specache_fx.runtime.quant.packing import pack, unpack

# Of evenly spaced levels, the distance with the least mean squared error on standard normal numbers (Max 1960, table
# II). At one bit only the sign counts.
_LEVEL_DISTANCE = {1: 1.5958, 2: 0.9957, 4: 0.3352, 8: 0.0308}


# The spread of the widest channel over that of the narrowest which still counts.
_MOST_SPREAD = 64


class TurboQuantizer(Quantizer):
    """`(code - middle) * scale + mean` in a rotated basis: a scale for each token, a mean for each channel and group.

    Planes are `(codes, scale, mean)`, and `balance` of keys. Codes are uint8 `[batch, num_kv_heads, tokens,
    ceil(head_dim * bits / 8)]`, packed along the rotated channels, and count from `middle = (2**bits - 1) / 2`. The
    scale is `[batch, num_kv_heads, tokens, 1]`, the mean `[batch, num_kv_heads, tokens / group_size, head_dim]`, the
    balance `[batch, num_kv_heads, 1, head_dim]`, all of the KV dtype.

    1. Balance, of keys alone: each channel is divided by the root of its spread over the row's first `group_size` real
       tokens. Queries are large where keys hardly vary; a rotation would spread the error of wide channels over narrow
       ones. Kernels multiply queries by it. The root is SmoothQuant's choice (Xiao et al., 2023) between keys and
       queries. Few tokens tell little of a spread: it is mixed with that of all channels.
    2. Rotation (`hadamard.rotate`): a large channel spreads over all, and numbers become nearly normal.
    3. Centring: an offset that the tokens of a group share goes into the mean, at 16 bits. Keys have large ones.
    4. Levels: evenly spaced, for normal numbers; at one and two bits they lose as little as Lloyd's and Max's.
    5. Norm: the scale gives the token the length that it had. The scale of least squared error makes it shorter, so
       that attention becomes flatter than it was (by a fifth at one bit).

    TurboQuant differs: its rotation is random, it neither balances nor centres, and it corrects inner products by the
    signs of a random projection of the error instead of by the norm.

    The error of a token, rotated or not, is at most sqrt(2) times its centred norm, of keys both balanced: a code has
    the sign of its number. Equal tokens come back as their rotated mean does, rounded to the KV dtype.

    Bits per value at group_size 64: the code's, 0.25 for the mean, and 16 / head_dim for the scale.
    """

    name = "turboquant"
    valid_bits = (1, 2, 4, 8)
    code_form = "centred"
    sequence_key_planes = 1
    exact_constants = ("key",)

    def quantize_key(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_key`."""
        return self.quantize_more_keys(x, (), real)

    def quantize_more_keys(
        self, x: torch.Tensor, held: Planes, real: torch.Tensor | None = None, num_ahead: int = 0
    ) -> Planes:
        """See `Quantizer.quantize_more_keys`."""
        before, tokens = held[0].shape[2] if held else 0, x.shape[2] - num_ahead
        new = x[:, :, :tokens]
        self._check_whole_groups(new)
        if real is None or not tokens:
            balance = held[3] if before else self._balance(new[:, :, : self.group_size], None)
            return *self._quantize(new, balance, None), balance
        balance = self._balance(*self._first_real(x, real[:, before:], num_ahead))
        if before:
            begun = real[:, :before].any(1)[:, None, None, None]
            balance = torch.where(begun, held[3], balance)
        return *self._quantize(new, balance, self._counted(real[:, before : before + tokens])), balance

    def quantize_value(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Planes:
        """See `Quantizer.quantize_value`."""
        return self._quantize(x, None, self._counted(real))

    def _first_real(
        self, x: torch.Tensor, real: torch.Tensor, num_ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's first group with a real token and the `num_ahead` tokens behind it, and which of them count.

        The first `group_size` real ones do. So a row has the balance that it would have without padding, if there are
        so many ahead. A row without a real token has any group.
        """
        size, tokens = self.group_size, x.shape[2]
        groups = real[:, : tokens - num_ahead].unflatten(1, ((tokens - num_ahead) // size, size))
        start = groups.any(2).to(torch.uint8).argmax(1, keepdim=True) * size
        places = start + torch.arange(size + num_ahead, device=x.device)
        shown = real.gather(1, places)
        first = x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        return first, shown & (shown.cumsum(1) <= size)

    def _balance(self, first: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """1 to 8 for each channel of these keys: the root of its spread, in units of a 64th of the widest one's.

        Not below 1: quotients stay within the range of the KV dtype. A row of n tokens, less than `group_size`, gets
        `1 - n / group_size` of a token more, whose variance is the mean of all channels'. Of two tokens alone, chance
        makes one channel's spread many times another's.

        Args:
            first: `[batch, num_kv_heads, tokens, head_dim]`; without tokens where there are none.
            real: bool `[batch, tokens]`: tokens that count; None for all of a group.
        """
        if not first.shape[2]:
            return first.new_ones((*first.shape[:2], 1, first.shape[3]))
        if real is None:  # a whole group
            variance = first.double().var(2, correction=0, keepdim=True)
        else:
            weight = real.double()[:, None, :, None]
            tokens = weight.sum(2, keepdim=True)
            weight = weight / tokens.clamp(min=1)
            offset = first.double() - (first * weight).sum(2, keepdim=True)
            variance = (offset.square() * weight).sum(2, keepdim=True)
            mixed = (1 - tokens / self.group_size).clamp(min=0)
            variance = (tokens * variance + mixed * variance.mean(3, keepdim=True)) / (tokens + mixed)
        spread = variance.sqrt()
        widest = spread.amax(3, keepdim=True)
        units = _MOST_SPREAD * spread / torch.where(widest == 0, 1.0, widest)
        return units.clamp_(min=1).sqrt_().to(first.dtype)

    def _quantize(
        self, x: torch.Tensor, balance: torch.Tensor | None, counted: torch.Tensor | None
    ) -> Planes:
        """Codes, scale and mean; only tokens that are `counted` (`_counted`) make the mean, if given."""
        self._check_whole_groups(x)
        if on_cpu.packs(x, self.group_size):
            return on_cpu.pack(x, balance, counted, self.bits, self.group_size, _LEVEL_DISTANCE[self.bits])
        dtype = x.dtype
        x = x.float() if balance is None else x.float() / balance.float()
        groups = rotate(x).unflatten(2, (x.shape[2] // self.group_size, self.group_size))
        # Sums in float64 do not depend on how many groups come at once (docs/laws.md, law 4), and never overflow.
        mean = saturated(_mean(groups, counted).float(), dtype)
        centred = groups - mean.float()
        norm = _norm(centred)
        deviation = (norm / x.shape[3] ** 0.5).float()
        unit = centred.div_(torch.where(deviation == 0, 1.0, deviation)).div_(_LEVEL_DISTANCE[self.bits])
        # Levels lie at odd halves: a number of either sign gets a code of that sign.
        codes = unit.floor_().add_(2 ** (self.bits - 1)).clamp_(0, 2**self.bits - 1)
        scale = saturated((norm / _norm(codes - self._middle)).float(), dtype)
        return pack(codes.to(torch.uint8).flatten(2, 3), self.bits), scale.flatten(2, 3), mean.squeeze(3)

    def dequantize_key(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantizer.dequantize_key`."""
        return saturated(self._dequantize(planes[:3], head_dim) * planes[3].float(), dtype)

    def score_deviation(self, planes: Planes, query: torch.Tensor) -> torch.Tensor:
        """See `Quantizer.score_deviation`: the error of a rotated token has no direction."""
        scale, balance = planes[1].float(), planes[3].float()
        norm = _norm(query * balance) * block_size(query.shape[-1]) ** 0.5
        return CODE_ERROR * norm.float() * scale.transpose(2, 3)

    def dequantize_value(self, planes: Planes, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Quantizer.dequantize_value`."""
        return saturated(self._dequantize(planes, head_dim), dtype)

    def _dequantize(self, planes: Planes, head_dim: int) -> torch.Tensor:
        codes, scale, mean = planes
        offsets = unpack(codes, self.bits, head_dim).float() - self._middle
        groups = (offsets * scale.float()).unflatten(2, (mean.shape[2], self.group_size))
        return rotate_back((groups + mean.float().unsqueeze(3)).flatten(2, 3))

    def error_bound(self, planes: Planes, head_dim: int, kind: KVKind) -> torch.Tensor:
        """`Quantizer.error_bound`: sqrt(2) times the token's centred norm, in the basis before the rotation."""
        codes, scale, _, *balance = planes
        offsets = unpack(codes, self.bits, head_dim).float() - self._middle
        norm = scale.float() * _norm(offsets).float() * block_size(head_dim) ** 0.5
        bound = 2**0.5 * norm * (1 + 2 * torch.finfo(scale.dtype).eps)  # the scale was rounded
        return bound * balance[0].float() if balance else bound

    @property
    def _middle(self) -> float:
        """The zero point of codes."""
        return (2**self.bits - 1) / 2


def _mean(groups: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """Of each group's tokens, float64 `[batch, num_kv_heads, groups, 1, head_dim]`; see `Quantizer._counted`."""
    if counted is None:
        return groups.mean(3, keepdim=True, dtype=torch.float64)
    weight = counted[:, None, :, :, None]
    return (groups * weight).sum(3, keepdim=True, dtype=torch.float64) / weight.sum(3, keepdim=True)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Of each token's numbers, float64 `[..., 1]`."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
