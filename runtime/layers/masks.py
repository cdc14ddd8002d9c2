"""Attention masks as a session reads them: the keys that are real, and the biases on their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specache_fx.errors import UnsupportedGraphError

_LEAVE = 'Compile this model with backend="inductor".'


def hides(row: torch.Tensor) -> torch.Tensor:
    """The keys that an additive mask hides: its value is so low that the key gets no weight, whatever its score.

    Models use the least number of their dtype, -inf, or a part of either (codegen divides the sum of scores and mask).
    Half precision has no room for that: there it is a number that no bias comes near.
    """
    return row <= hides_from(row.dtype)


def hides_from(dtype: torch.dtype) -> float:
    """The largest number of an additive mask of a dtype that hides, see `hides`."""
    least = torch.finfo(dtype).min
    return least / 2 if dtype == torch.float16 else least / 2**16


def over_keys(row: torch.Tensor, kv_len: int) -> torch.Tensor:
    """A row of a mask `[..., kv_len]`, also where it has one column for all keys."""
    return row.expand(*row.shape[:-1], kv_len) if row.shape[-1] == 1 else row


def real_keys(row: torch.Tensor, batch: int) -> torch.Tensor | None:
    """The keys that a row shows, where that can be told without its numbers.

    Args:
        row: See `split_row`.
        batch: Sequences.

    Returns:
        Bool `[batch, kv_len]`, a view; None where the mask is added to scores, or heads have masks of their own.
    """
    row = row.reshape((1,) * (3 - row.dim()) + tuple(row.shape))
    return row[:, 0].expand(batch, -1) if row.dtype == torch.bool and row.shape[1] == 1 else None


def split_row(row: torch.Tensor, batch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Split the newest query's row of an attention mask into padding and bias.

    Args:
        row: bool (True where a key is real) or float that is added to the scores: `[kv_len]`,
            `[num_heads or 1, kv_len]` or `[batch or 1, num_heads or 1, kv_len]`.
        batch: Sequences.

    Returns:
        Which keys are real, bool `[batch, kv_len]`, None where all are; and the bias,
        `[batch or 1, num_heads or 1, kv_len]` of the mask's dtype, 0 at hidden keys, None where it is 0 everywhere.

    Raises:
        UnsupportedGraphError: If it hides keys from some heads only, or a bias is not finite.
    """
    row = row.reshape((1,) * (3 - row.dim()) + tuple(row.shape))
    bias: torch.Tensor | None = None
    if row.dtype == torch.bool:
        real = row
    else:
        hidden = hides(row)
        real, bias = ~hidden, row.masked_fill(hidden, 0)
        if not bool(bias.any()):
            bias = None
        elif not bool(bias.isfinite().all()):
            raise UnsupportedGraphError(
                f"An additive attention mask holds values that are neither finite nor -inf. {_LEAVE}"
            )
    if real.shape[1] > 1 and not torch.equal(real, real[:, :1].expand_as(real)):
        raise UnsupportedGraphError(f"An attention mask hides keys from some heads only. {_LEAVE}")
    real = real[:, 0].expand(batch, -1)
    return (None if bool(real.all()) else real.clone()), bias


def hidden_bias(seen: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """One bias from the two results of `split_row`: -inf where a key is hidden.

    Returns:
        `[batch or 1, num_heads or 1, kv_len]`; None where nothing is hidden and nothing added.
    """
    if seen is None:
        return bias
    hidden = ~seen[:, None]
    return (torch.zeros(hidden.shape, device=seen.device) if bias is None else bias).masked_fill(
        hidden, -torch.inf
    )


def by_lane(rows: Sequence[torch.Tensor | None], num_stored: int, independent: bool) -> torch.Tensor | None:
    """A row of each lane's mask or bias, laid out over the columns of all lanes as a kernel reads them.

    Args:
        rows: One per lane, `[..., pairs + 1]`: the newest stored pairs that the lane may see, and last its own. Lane 1
            is a token later: lane 0's own pair comes before its own. None: 0 everywhere.
        num_stored: Columns of stored pairs.
        independent: All lanes are the same token, and each sees its own pair only.

    Returns:
        `[lanes, ..., num_stored + lanes]`, 0 where a lane has no such pair; None where all rows are None.
    """
    known = [row for row in rows if row is not None]
    if not known:
        return None
    shape = torch.broadcast_shapes(*(row.shape[:-1] for row in known))
    out = known[0].new_zeros((len(rows), *shape, num_stored + len(rows)))
    for lane, row in enumerate(rows):
        if row is not None:
            others = 0 if independent else lane
            seen = row[..., : num_stored + others + 1]
            stored, own = seen.split([seen.shape[-1] - others - 1, others + 1], dim=-1)
            out[lane, ..., num_stored - stored.shape[-1] : num_stored] = stored
            out[lane, ..., num_stored + lane - others : num_stored + lane + 1] = own
    return out


@dataclass(frozen=True)
class WindowMask:
    """A model's mask over a window's pairs and, last, the token's own.

    Attributes:
        width: Pairs that it covers, the token's own included.
        seen: bool `[batch, width]`, True where the token may look; None: everywhere.
        bias: Added to the scores, `[batch or 1, num_heads or 1, width]`; None where nothing is.
    """

    width: int
    seen: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def of(cls, row: torch.Tensor, batch: int) -> WindowMask:
        """Read the newest query's row of a mask, see `split_row`. `seen` may be all True."""
        real = real_keys(row, batch)  # nothing waits for the device then
        return cls(row.shape[-1], *(split_row(row, batch) if real is None else (real, None)))
