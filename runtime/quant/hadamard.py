"""The Walsh-Hadamard transform over channels, with signs that keep equal numbers from piling up."""

from __future__ import annotations

import functools

import torch


def block_size(head_dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def signs(block: int, device: torch.device) -> torch.Tensor:
    """+-1 for each channel of a block, float32 `[block]`: the Rudin-Shapiro sequence.

    The transform of equal numbers is one large number and zeros; with these signs it is as flat as it can be. Made
    on the device, without a copy from the host.
    """
    channel = torch.arange(block, device=device)
    both = channel & (channel >> 1)  # neighbouring ones in the binary form
    ones = torch.zeros_like(both)
    for place in range(block.bit_length()):
        ones += (both >> place) & 1
    return (1 - 2 * (ones % 2)).float()


def transform(x: torch.Tensor, block: int) -> torch.Tensor:
    """`x @ H / block` for each block of channels, with H the Hadamard matrix (Sylvester's) of that order.

    Done twice it gives `x / block`: rotating back is `block` times the same. H over the root of `block` is
    orthonormal; over `block`, a power of two, numbers become exact fractions and never leave the range of x.

    Butterflies, not a product with H, compute it. Their sums are the same however many tokens come at once
    (`docs/laws.md`, law 4); a matmul doesn't promise that.

    Args:
        x: float32 `[..., channels]`, `channels` a multiple of `block`.
        block: A power of two.
    """
    # Channels first: each butterfly is then an addition of long rows, three times as fast.
    rows = (x / block).reshape(-1, x.shape[-1]).t().contiguous()
    other = torch.empty_like(rows)
    size = 1
    while size < block:
        first, second = rows.unflatten(0, (-1, 2, size)).unbind(1)
        sums, differences = other.unflatten(0, (-1, 2, size)).unbind(1)
        torch.add(first, second, out=sums)
        torch.sub(first, second, out=differences)
        rows, other = other, rows
        size *= 2
    return rows.t().reshape(x.shape)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Float32 `[..., channels]`, rotated by blocks; no number is larger than the largest of x's block.

    The rotation is Hadamard's with fixed signs, orthonormal up to a power of two. An odd number of channels is not
    rotated at all.
    """
    block = block_size(x.shape[-1])
    return transform(x.float() * _all_signs(x, block), block)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Undo `rotate`, of float32."""
    block = block_size(x.shape[-1])
    # The factor comes last: sums of numbers at the end of the range would else be infinity minus infinity.
    return transform(x, block) * (_all_signs(x, block) * block)


@functools.cache
def rotation(head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices for kernels that read rotated codes, float32 `[head_dim, head_dim]`, to be multiplied from the right.

    Returns:
        `rotate`, for queries: times `block_size(head_dim)`, their products with rotated keys are those of both before.
        And `rotate_back`, for sums of rotated values.
    """
    one = torch.eye(head_dim, device=device)
    return rotate(one).contiguous(), rotate_back(one).contiguous()


def _all_signs(x: torch.Tensor, block: int) -> torch.Tensor:
    return signs(block, x.device).repeat(x.shape[-1] // block)
