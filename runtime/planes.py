"""`PlaneStore`: the device copy's low-bit planes of one layer's keys or values, growing by whole groups."""

from __future__ import annotations

import torch

from specache_fx.runtime.quant import Planes


class PlaneStore:
    """Planes of one layer's keys (or values), with room to grow.

    A plane is 4-D, `[batch, num_kv_heads, rows, width]`, with so many rows per group of tokens. The first `put` takes
    exactly what it needs (a prompt); later ones grow by an eighth, so that appending copies each code a few times at
    most, and the slack stays small.

    Args:
        group_size: Tokens of a group.
        of_sequence: How many planes, the last ones, are one row for all groups: the newest that were put.
    """

    def __init__(self, group_size: int, of_sequence: int = 0) -> None:
        self.group_size = group_size
        self._of_sequence = of_sequence
        self.num_groups = 0
        self._capacity = 0
        self._planes: Planes = ()
        self._view: Planes | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens held: a multiple of `group_size`."""
        return self.num_groups * self.group_size

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return sum(plane.untyped_storage().nbytes() for plane in self._planes)

    def view(self) -> Planes:
        """The planes of the tokens that are held; no copy. The same tensors each time, until a group comes or goes."""
        if self._view is None:
            grouped, rest = self._split(self._planes)
            held = (plane[:, :, : self.num_groups * (plane.shape[2] // self._capacity)] for plane in grouped)
            self._view = (*held, *rest)
        return self._view

    def _split(self, planes: Planes) -> tuple[Planes, Planes]:
        """The planes of groups, and those of the sequence."""
        end = len(planes) - self._of_sequence
        return planes[:end], planes[end:]

    def reserve(self, num_groups: int, like: Planes, groups_in_like: int) -> None:
        """Make room for `num_groups` groups in all, with planes that look like `like`."""
        if num_groups <= self._capacity:
            return
        grown = []
        grouped, rest = self._split(like)
        for i, plane in enumerate(grouped):
            batch, heads, rows, width = plane.shape
            per_group = rows // groups_in_like
            buffer = plane.new_empty((batch, heads, num_groups * per_group, width))
            if self.num_groups:
                buffer[:, :, : self.num_groups * per_group] = self._planes[i][
                    :, :, : self.num_groups * per_group
                ]
            grown.append(buffer)
        self._planes, self._capacity, self._view = (*grown, *rest), num_groups, None

    def put(self, planes: Planes, num_tokens: int) -> None:
        """Append the planes of `num_tokens` tokens, a multiple of `group_size`."""
        groups = num_tokens // self.group_size
        needed = self.num_groups + groups
        if needed > self._capacity:
            self.reserve(max(needed, self._capacity + self._capacity // 8), planes, groups)
        self._planes = (*self._split(self._planes)[0], *self._split(planes)[1])
        for buffer, plane in zip(self._split(self._planes)[0], self._split(planes)[0], strict=True):
            per_group = plane.shape[2] // groups
            buffer[:, :, self.num_groups * per_group : needed * per_group] = plane
        self.num_groups, self._view = needed, None

    def take(self, source: PlaneStore, rows: torch.Tensor) -> None:
        """Hold what `source` holds, of its batch rows `rows`, int64 `[batch]` on the device. `source` may be self."""
        self._planes = tuple(plane.index_select(0, rows) for plane in source.view())
        self.num_groups = self._capacity = source.num_groups
        self._view = None

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, a multiple of `group_size`."""
        self.num_groups = min(self.num_groups, num_tokens // self.group_size)
        self._view = None
