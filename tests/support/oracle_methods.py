"""What the quantisers besides "kivi" make of keys and values: each written down once more, plain and slow.

Functions of `(x [batch, num_kv_heads, tokens, head_dim], bits, group_size)`, to what C' holds of x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.lloyd_levels import lloyd_levels
from support.oracle_groups import in_range, quantize_group
from torch import Tensor

Method = Callable[[Tensor, int, int], Tensor]


def by_channel(group: Callable[[Tensor, int], Tensor]) -> Method:
    """`group(x, bits)` of `group_size` tokens of one channel; x is [batch, num_kv_heads, group_size, 1]."""

    def method(x: Tensor, bits: int, group_size: int) -> Tensor:
        channels = [
            torch.cat([group(part, bits) for part in channel.split(group_size, dim=2)], dim=2)
            for channel in x.split(1, dim=3)
        ]
        return torch.cat(channels, dim=3)

    return method


def by_token(group: Callable[[Tensor, int], Tensor]) -> Method:
    """`group(x, bits)` of some channels of one token; x is [batch, num_kv_heads, 1, channels]."""

    def method(x: Tensor, bits: int, group_size: int) -> Tensor:
        channels = min(group_size, x.shape[3])
        tokens = [
            torch.cat([group(part, bits) for part in token.split(channels, dim=3)], dim=3)
            for token in x.split(1, dim=2)
        ]
        return torch.cat(tokens, dim=2)

    return method


def original(x: Tensor, bits: int) -> Tensor:
    """Eq. 2, whatever the bits; the group is all of dims 2 and 3."""
    flat = x.flatten(2)
    return quantize_group(flat, 2, bits, original=True).view_as(x)


def nearest_level(x: Tensor, bits: int) -> Tensor:
    """The level that is nearest, of those between the group's extremes; the lower one of two as near."""
    flat = x.flatten(2)
    wide = flat.float()
    low, high = wide.amin(2, keepdim=True), wide.amax(2, keepdim=True)
    half = ((high - low) / 2).to(x.dtype).float()
    # Halves first: low + high may leave float32's range. Half of the smallest number is none: see to equals.
    middle = torch.where(low == high, low, low / 2 + high / 2).to(x.dtype).float()
    half = torch.where((high - low).isinf(), (high / 2 - low / 2).to(x.dtype).float(), half)
    unit = (wide - middle) / torch.where(half == 0, 1.0, half)
    best = torch.full_like(unit, torch.inf, dtype=torch.float64)
    nearest = torch.zeros_like(unit)
    for level in lloyd_levels(bits):
        distance = (unit.double() - level).abs()
        nearest = torch.where(distance < best, level, nearest)
        best = torch.minimum(best, distance)
    return in_range(nearest * half + middle, x.dtype).view_as(x)


def hadamard(x: Tensor) -> Tensor:
    """Sylvester's recursion along the last dimension, each level divided by 2."""
    count = x.shape[-1]
    if count == 1:
        return x
    first, second = hadamard(x[..., : count // 2]), hadamard(x[..., count // 2 :])
    return torch.cat([first / 2 + second / 2, first / 2 - second / 2], dim=-1)


def rudin_shapiro(count: int) -> Tensor:
    """a(2n) = a(n), a(2n + 1) = (-1)^n a(n)."""
    terms = [1]
    for i in range(1, count):
        half, odd = divmod(i, 2)
        terms.append(-terms[half] if odd and half % 2 else terms[half])
    return torch.tensor(terms, dtype=torch.float32)


def largest_power_of_two(head_dim: int) -> int:
    block = 1
    while head_dim % (2 * block) == 0:
        block *= 2
    return block


def rotated(inner: Callable[[Callable[[Tensor, int], Tensor]], Method]) -> Method:
    """KIVI between a rotation of each block of channels and its inverse."""

    def method(x: Tensor, bits: int, group_size: int) -> Tensor:
        block = largest_power_of_two(x.shape[3])
        signs = rudin_shapiro(block)

        def kivi(group: Tensor, bits: int) -> Tensor:
            flat = group.flatten(2)
            return quantize_group(flat, 2, bits, stored=x.dtype).view_as(group)

        y = torch.cat([hadamard(part.float() * signs) for part in x.split(block, dim=3)], dim=3)
        z = inner(kivi)(y, bits, group_size)
        back = torch.cat([hadamard(part) * block * signs for part in z.split(block, dim=3)], dim=3)
        return in_range(back, x.dtype)

    return method


LEVEL_DISTANCE = {1: 1.5958, 2: 0.9957, 4: 0.3352, 8: 0.0308}  # Max 1960, table II


def of_real_tokens(method: Method, x: Tensor, bits: int, group_size: int, real: Tensor) -> Tensor:
    """What `method` makes of each group's real tokens (`real`, bool [batch, tokens]), as if there were no padding."""
    back = torch.zeros_like(x)
    for row, shown in enumerate(real.tolist()):
        for start in range(0, x.shape[2], group_size):
            places = [i for i in range(start, start + group_size) if shown[i]]
            if places:
                back[row, :, places] = method(x[row : row + 1, :, places], bits, group_size)[0]
    return back


def balanced(x: Tensor, bits: int, group_size: int, real: Tensor, num_ahead: int) -> Tensor:
    """TurboQuant's keys: `norm_kept` of channels that are divided by the root of their spread."""
    factor, tokens = balance(x, group_size, real, num_ahead), x.shape[2] - num_ahead

    def method(part: Tensor, bits: int, group_size: int) -> Tensor:
        return norm_kept(part, bits, group_size, x.dtype)

    even = (x.float() / factor)[:, :, :tokens]
    return in_range(of_real_tokens(method, even, bits, group_size, real) * factor, x.dtype)


def balance(x: Tensor, group_size: int, real: Tensor, num_ahead: int) -> Tensor:
    """What the channels of TurboQuant's keys are divided by, float32 [batch, num_kv_heads, 1, head_dim].

    The spread is that of a batch row's first `group_size` real tokens (`real`, bool [batch, tokens]), as far as they
    are in its first group with one or up to `num_ahead` tokens behind that. Where there are n, fewer than that, its
    square is mixed with `1 - n / group_size` of a token of the mean of all channels'. It counts in 64ths of the
    widest channel's, and one 64th at least.
    """
    tokens = x.shape[2] - num_ahead
    spreads = []
    for row, keys in enumerate(x.double()):
        shown = real[row].tolist()
        start = next((i for i in range(0, tokens, group_size) if any(shown[i : i + group_size])), 0)
        places = [i for i in range(start, start + group_size + num_ahead) if shown[i]][:group_size]
        if places:
            first, n = keys[:, places], len(places)
            variance = (first - first.mean(1, keepdim=True)).square().mean(1, keepdim=True)
            more = 1 - n / group_size
            spreads.append(((n * variance + more * variance.mean(2, keepdim=True)) / (n + more)).sqrt())
        else:
            spreads.append(torch.zeros_like(keys[:, :1]))
    spread = torch.stack(spreads)
    widest = spread.amax(3, keepdim=True)
    share = torch.where(widest == 0, 0.0, spread / torch.where(widest == 0, 1.0, widest))
    return (64 * share).clamp(min=1).sqrt().to(x.dtype).float()


def norm_kept(
    x: Tensor, bits: int, group_size: int, stored: torch.dtype | None = None, steps: bool = False
) -> Tensor:
    """TurboQuant: rotated, less the group's mean, levels for normal numbers, each token as long as it was.

    With `steps`, the distance of a token's levels in all channels instead, after the rotation.
    """
    stored = stored or x.dtype
    block = largest_power_of_two(x.shape[3])
    signs = rudin_shapiro(block)
    y = torch.cat([hadamard(part.float() * signs) for part in x.split(block, dim=3)], dim=3)
    groups = []
    for group in y.split(group_size, dim=2):
        mean = in_range(group.double().mean(2, keepdim=True).float(), stored).float()
        token = group - mean
        length = token.double().norm(dim=3, keepdim=True)
        deviation = (length / x.shape[3] ** 0.5).float()
        unit = token / torch.where(deviation == 0, 1.0, deviation) / LEVEL_DISTANCE[bits]
        # Levels lie at odd halves; the one above where a number lies in the middle.
        offset = (unit.floor() + 0.5).clamp(0.5 - 2 ** (bits - 1), 2 ** (bits - 1) - 0.5)
        scale = in_range((length / offset.double().norm(dim=3, keepdim=True)).float(), stored)
        groups.append(scale.float().expand_as(offset) if steps else offset * scale.float() + mean)
    if steps:
        return torch.cat(groups, dim=2)
    z = torch.cat(groups, dim=2)
    back = torch.cat([hadamard(part) * block * signs for part in z.split(block, dim=3)], dim=3)
    return in_range(back, x.dtype)


def channel_separable(x: Tensor, bits: int, group_size: int) -> Tensor:
    """ZipCache's values: channels brought to a common size in each group of tokens, then token by token."""
    groups = []
    for group in x.split(group_size, dim=2):
        largest = group.double().abs().amax(2, keepdim=True)
        size = largest.sqrt().to(x.dtype).float()
        rows = []
        for row in group.split(1, dim=2):
            even = torch.where(size == 0, row.float(), row.float() / size)
            rows.append(quantize_group(even, 3, bits, stored=x.dtype) * size)
        groups.append(in_range(torch.cat(rows, dim=2), x.dtype))
    return torch.cat(groups, dim=2)


def improved(x: Tensor, bits: int) -> Tensor:
    """Eq. 2, eq. 3 at one bit."""
    flat = x.flatten(2)
    return quantize_group(flat, 2, bits).view_as(x)


# Keys with a row for the whole sequence: the functions take `real`, bool [batch, tokens], and `num_ahead` too.
DEQUANTIZED_SEQUENCE: dict[str, Callable[[Tensor, int, int, Tensor, int], Tensor]] = {"turboquant": balanced}
DEQUANTIZED_KEY: dict[str, Method] = {
    "kivi": by_channel(improved),
    "kivi-original": by_channel(original),
    "nuq": by_channel(nearest_level),
    "rotated": rotated(by_channel),
    "zipcache": by_channel(improved),
}
DEQUANTIZED_VALUE: dict[str, Method] = {
    "kivi": by_token(improved),
    "kivi-original": by_token(original),
    "nuq": by_token(nearest_level),
    "rotated": rotated(by_token),
    "turboquant": norm_kept,
    "zipcache": channel_separable,
}
