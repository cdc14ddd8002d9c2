"""`KeyMask`: which keys of a session are real and which are padding."""

from __future__ import annotations

import torch

from specache_fx.errors import UnsupportedGraphError


def real_keys(row: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Which keys an attention mask lets the newest query see.

    Args:
        row: The mask's last row, `[kv_len]` or `[batch or 1, ..., kv_len]`: bool, or float that is added to scores.
        batch: Rows of the session.

    Returns:
        Bool `[batch, kv_len]`; None where every key is real.

    Raises:
        UnsupportedGraphError: If the mask is neither "attend" nor "don't" somewhere.
    """
    if row is None:
        return None
    row = row.reshape(-1, row.shape[-1]).expand(batch, -1)
    if row.dtype != torch.bool:
        keep = row == 0
        if not bool((keep | (row <= torch.finfo(row.dtype).min / 2)).all()):
            raise UnsupportedGraphError(
                "An additive attention mask holds values that are neither 0 nor the least of its dtype, so it is"
                " a bias and no padding mask. Biases in attention are not supported: compile this model with"
                ' backend="inductor".'
            )
        row = keep
    return None if bool(row.all()) else row.clone()


class KeyMask:
    """What the mask of the prompt (or of the last extend) called padding; decoded tokens are real."""

    def __init__(self) -> None:
        self._real: torch.Tensor | None = None

    @property
    def has_padding(self) -> bool:
        """Whether any key is padding."""
        return self._real is not None

    def read(self, row: torch.Tensor | None, batch: int) -> None:
        """Take over what a mask says, see `real_keys`."""
        self._real = real_keys(row, batch)

    def at(self, kv_len: int) -> torch.Tensor | None:
        """Bool `[batch, kv_len]` for a length of now or later; None where every key is real."""
        if self._real is None or self._real.shape[1] == kv_len:
            return self._real
        return torch.nn.functional.pad(self._real, (0, kv_len - self._real.shape[1]), value=True)

    def grow(self, kv_len: int) -> torch.Tensor | None:
        """As `at`, and keep it: a step's first layer lengthens the mask for all."""
        self._real = self.at(kv_len)
        return self._real

    def crop(self, kv_len: int) -> None:
        """Keep the first `kv_len` keys."""
        if self._real is not None:
            self._real = self._real[:, :kv_len]

    def agrees(self, row: torch.Tensor, batch: int, kv_len: int) -> bool:
        """Whether a mask hides just the padding at a length of now or later.

        Args:
            row: See `real_keys`.
            batch: Rows of the session.
            kv_len: Keys that the attention will have, its own included.
        """
        seen, real = real_keys(row, batch), self.at(kv_len)
        if seen is None or real is None:
            return seen is real
        return torch.equal(seen, real)

    @property
    def device_bytes(self) -> int:
        """Bytes of the mask."""
        return 0 if self._real is None else self._real.untyped_storage().nbytes()
