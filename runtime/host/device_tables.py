"""`DeviceTables`: where a device finds the rows of a host cache that it reads by itself."""

from __future__ import annotations

import torch


class DeviceTables:
    """Copies of `HostCache.table` on a device, which launches read at addresses that stay.

    Args:
        device: Reads them.

    Attributes:
        moved: Times that a layer's table got another address than before.
        num_read: int64 `[2]` on the device: keys and values that attention has read there (`Originals`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.moved = device, 0
        with torch.inference_mode(False):
            self.num_read = torch.zeros(2, dtype=torch.int64, device=device)
        # Of each layer the host's table as it was copied last, and the copy.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy_of(self, layer: int, table: torch.Tensor) -> torch.Tensor:
        """A layer's table on the device. `table` is the host's: another tensor once a block has come."""
        known, copied = self._copies.get(layer, (None, None))
        if copied is not None and known is table:
            return copied
        with torch.inference_mode(False):
            if copied is None or len(copied) != len(table):
                copied = torch.empty_like(table, device=self._device)
                self.moved += 1
            # From pageable memory the driver takes its own copy, at once.
            copied.copy_(table, non_blocking=True)
        self._copies[layer] = table, copied
        return copied

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.num_read.nbytes + sum(copied.nbytes for _, copied in self._copies.values())
