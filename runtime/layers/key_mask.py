"""`KeyMask`: which keys of a session are real and which are padding."""

from __future__ import annotations

import torch

from specache_fx.runtime.layers.masks import split_row


class KeyMask:
    """Padding: keys that the masks of the prompt (or of the last extend) hid, and no mask has shown since.

    Attributes:
        real: Bool `[batch, tokens]`, maybe of fewer tokens than there are; None where no key is padding.
    """

    def __init__(self) -> None:
        self.real: torch.Tensor | None = None

    def read(self, row: torch.Tensor | None, batch: int) -> None:
        """Take over the padding of a mask's newest row, see `split_row`."""
        self.real = None if row is None else split_row(row, batch)[0]

    def widen(self, row: torch.Tensor | None, batch: int) -> None:
        """Keys that another layer's mask shows are real as well: they are hidden elsewhere, but no padding."""
        if self.real is not None:
            real = None if row is None else split_row(row, batch)[0]
            self.put(None if real is None else self.real | real)

    def at(self, kv_len: int) -> torch.Tensor | None:
        """Bool `[batch, kv_len]` for any length; None where every key is real."""
        if self.real is None or self.real.shape[1] == kv_len:
            return self.real
        return torch.nn.functional.pad(self.real, (0, kv_len - self.real.shape[1]), value=True)

    def grow(self, kv_len: int) -> torch.Tensor | None:
        """As `at`, and keep it: a step's first layer lengthens the mask for all."""
        self.real = self.at(kv_len)
        return self.real

    def crop(self, kv_len: int) -> None:
        """Keep the first `kv_len` keys."""
        if self.real is not None:
            self.put(self.real[:, :kv_len])

    def reorder(self, rows: torch.Tensor) -> None:
        """Set batch row i to the former row `rows[i]`, int64 `[batch]` on the device."""
        self.put(None if self.real is None else self.real.index_select(0, rows))

    def put(self, real: torch.Tensor | None) -> None:
        """Have this padding: see `real`."""
        self.real = None if real is None or bool(real.all()) else real

    def agrees(self, seen: torch.Tensor | None, kv_len: int) -> bool:
        """Whether a mask hides just the padding at a length of now or later.

        Args:
            seen: The keys that it shows, bool `[batch, kv_len]`; None where it shows all.
            kv_len: Keys that the attention will have, its own included.
        """
        real = self.at(kv_len)
        if seen is None or real is None:
            return seen is real
        return torch.equal(seen, real)

    def show(self, seen: torch.Tensor | None, kv_len: int) -> bool:
        """Keys that a mask shows while decoding are no padding from now on; whether any were. See `agrees`."""
        stored = kv_len - 1  # without the token's own
        real = self.at(stored)
        if real is None or (seen is not None and not bool((seen[:, :stored] & ~real).any())):
            return False
        self.put(None if seen is None else real | seen[:, :stored])
        return True

    def shows(self, before: torch.Tensor | None) -> bool:
        """Whether keys are real that were padding: not so in `before`, bool `[batch, tokens]` of an earlier `real`."""
        if before is None:
            return False
        real = self.at(before.shape[1])
        return real is None or bool((real & ~before).any())

    @property
    def device_bytes(self) -> int:
        """Bytes of the mask."""
        return 0 if self.real is None else self.real.untyped_storage().nbytes()
