"""`WindowCache`: the pairs of a layer that attends to its newest tokens alone, exact and on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specache_fx.errors import CacheHandleError, UnsupportedGraphError
from specache_fx.runtime.masks import split_row

_GROW_ROWS = 64


@dataclass(frozen=True)
class WindowMask:
    """What a model's mask says of a window's pairs and, last, of the token's own.

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
        """Read the newest query's row of a mask, see `split_row`."""
        return cls(row.shape[-1], *split_row(row, batch))


class WindowCache:
    """The newest `window - 1` keys and values of a layer (a sliding window, or the chunk that is being written).

    With the query's own pair these are all that the model itself keeps. Nothing is quantised, offloaded or selected.
    The buffer has an eighth more rows: pairs move to its front when it is full, and not with every token, and the last
    token can be taken back (`truncate`).

    Args:
        window: Tokens that a query reaches, its own included.
    """

    def __init__(self, window: int) -> None:
        self.window_size = window - 1
        self.kv_len = 0
        self._filled = 0
        self._key = torch.empty(0, device="cpu")
        self._value = torch.empty(0, device="cpu")

    @property
    def held(self) -> int:
        """Pairs that a query attends to, without its own."""
        return min(self.kv_len, self.window_size)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self._key.untyped_storage().nbytes() + self._value.untyped_storage().nbytes()

    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest pairs in order, `[batch, num_kv_heads, held, dim]` each; views, no copy."""
        rows = slice(self._filled - self.held, self._filled)
        return self._key[:, :, rows], self._value[:, :, rows]

    def history(self, kv_len: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model would have as its past now, or had at an earlier length: fresh tensors.

        Raises:
            CacheHandleError: If it would need pairs that have left the window.
        """
        kv_len = self.kv_len if kv_len is None else kv_len
        self.check_truncate(kv_len)
        end = self._filled - (self.kv_len - kv_len)
        rows = slice(end - min(kv_len, self.window_size), end)
        return self._key[:, :, rows].clone(), self._value[:, :, rows].clone()

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append new pairs: a prompt, a chunk, or one decoded token.

        Args:
            key: `[batch, num_kv_heads, q_len, key_dim]`.
            value: `[batch, num_kv_heads, q_len, value_dim]`.
        """
        q_len = key.shape[2]
        self.kv_len += q_len
        new_len = min(q_len, self.window_size)
        most = buffer_rows(self.window_size)
        if self._filled + new_len > most:
            # One token leaves the whole window before it in place, for `truncate`; of several, only what is needed.
            self._compact(self.window_size if q_len == 1 else self.window_size - new_len)
        needed = self._filled + new_len
        if self._key.dim() != 4 or self._key.shape[2] < needed:
            room = needed
            if self._key.dim() == 4:  # a prompt takes exactly what it needs
                room = max(needed, grown_rows(self._key.shape[2], self.window_size))
            self._key, self._value = self._grown(self._key, key, room), self._grown(self._value, value, room)
        self._key[:, :, self._filled : needed] = key[:, :, q_len - new_len :]
        self._value[:, :, self._filled : needed] = value[:, :, q_len - new_len :]
        self._filled = needed

    def _compact(self, keep: int) -> None:
        """Move the newest pairs to the front."""
        for buffer in (self._key, self._value):
            buffer[:, :, :keep] = buffer[:, :, self._filled - keep : self._filled].clone()
        self._filled = keep

    def _grown(self, old: torch.Tensor, like: torch.Tensor, room: int) -> torch.Tensor:
        batch, heads, _, dim = like.shape
        buffer = like.new_empty((batch, heads, room, dim))
        if self._filled:
            buffer[:, :, : self._filled] = old[:, :, : self._filled]
        return buffer

    def check_truncate(self, kv_len: int) -> None:
        """Make sure that `truncate` can be served.

        Raises:
            CacheHandleError: If it would need pairs that have left the window.
        """
        if min(kv_len, self.window_size) > self._filled - max(0, self.kv_len - kv_len):
            raise CacheHandleError(
                f"The KV cache can't go back from {self.kv_len} tokens to {kv_len}: a layer with a window of"
                f" {self.window_size + 1} tokens has dropped pairs that it would need again. Crop such a cache before"
                " its window is full, or start from the prompt."
            )

    def truncate(self, kv_len: int) -> None:
        """Keep the first `kv_len` tokens (crop, or undoing a step that failed midway); see `check_truncate`."""
        self.check_truncate(kv_len)
        if kv_len < self.kv_len:
            self._filled -= self.kv_len - kv_len
            self.kv_len = kv_len

    def take(self, source: WindowCache, rows: torch.Tensor) -> None:
        """Hold what `source` holds, of its batch rows `rows`: a reordering of this cache, or a copy of another.

        Args:
            source: This cache itself, or the cache of the same layer in another session.
            rows: int64, on the device: row i becomes a copy of the source's row `rows[i]`.
        """
        self._key = source._key.index_select(0, rows)
        self._value = source._value.index_select(0, rows)
        self._filled, self.kv_len = source._filled, source.kv_len

    def snapshot(self) -> dict[str, torch.Tensor]:
        """What the layer holds, by name: views, and `sizes`, int64 `[3]`: rows of the buffer, filled ones, tokens."""
        filled = {
            name: side[:, :, : self._filled] for name, side in (("key", self._key), ("value", self._value))
        }
        return {"sizes": torch.tensor([self._key.shape[2], self._filled, self.kv_len]), **filled}

    def restore(self, held: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Hold what `snapshot` gave, on `device`, in a buffer as large; the layer is empty."""
        room, self._filled, self.kv_len = held["sizes"].tolist()
        with torch.inference_mode(False):
            self._key, self._value = (
                held[name].new_empty((*held[name].shape[:2], room, held[name].shape[3]), device=device)
                for name in ("key", "value")
            )
        self._key[:, :, : self._filled] = held["key"]
        self._value[:, :, : self._filled] = held["value"]

    def masked(
        self, masks: Sequence[WindowMask | None], independent: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which pairs each lane attends to, and what is added to their scores.

        Lane 1 is one token later: the oldest pair has left its window when that is full, and lane 0's is in it.

        Args:
            masks: The model's own, one a lane; None hides and adds nothing. Lane 1's covers the window as it will be.
            independent: The lanes are the same token and don't see each other (pre-decode).

        Returns:
            Bool `[lanes, batch, held + lanes]`: the window's pairs, then the lanes' own; None where a single lane
            attends to all of them. And `[lanes, batch or 1, num_heads or 1, held + lanes]` of the masks' dtype; None
            where nothing is added.

        Raises:
            UnsupportedGraphError: If a mask is not as wide as the window.
        """
        for lane, mask in enumerate(masks):
            wide = self._cached(lane, independent)
            if mask is not None and mask.width != wide + 1:
                raise UnsupportedGraphError(
                    f"The mask of a layer with a window covers {mask.width} keys, where the layer has {wide} and"
                    ' the token\'s own. Compile this model with backend="inductor".'
                )
        seen = [None if mask is None else mask.seen for mask in masks]
        visible = None
        if len(masks) > 1 or seen[0] is not None:
            empty = torch.zeros(len(masks), self._key.shape[0], 0, dtype=torch.bool, device=self._key.device)
            visible = self._by_lane(seen, empty, True, independent)
        biases = [None if mask is None else mask.bias for mask in masks]
        known = [bias for bias in biases if bias is not None]
        if not known:
            return visible, None
        shape = torch.broadcast_shapes(*(bias.shape[:2] for bias in known))
        return visible, self._by_lane(biases, known[0].new_zeros((len(masks), *shape, 0)), 0, independent)

    def _cached(self, lane: int, independent: bool) -> int:
        """Pairs that a lane finds in its window, besides its own."""
        return min(self.kv_len + (0 if independent else lane), self.window_size)

    def _by_lane(
        self, rows: Sequence[torch.Tensor | None], empty: torch.Tensor, default: float, independent: bool
    ) -> torch.Tensor:
        """Lay out one row a lane over the columns of all: `[..., held + lanes]`, 0 where a lane has no such pair.

        Args:
            rows: `[..., pairs + 1]` each; None stands for `default` everywhere.
            empty: `[lanes, ..., 0]`: shape, dtype and device.
            default: What None stands for.
            independent: See `masked`.
        """
        held = self.held
        out = empty.new_zeros((*empty.shape[:-1], held + len(rows)))
        for lane, row in enumerate(rows):
            ahead = 0 if independent else lane
            wide = self._cached(lane, independent)
            stored = wide - ahead
            out[lane, ..., held - stored : held] = default if row is None else row[..., :stored]
            for back in range(ahead + 1):
                out[lane, ..., held + lane - back] = default if row is None else row[..., wide - back]
        return out


def buffer_rows(window_size: int) -> int:
    """Rows that a window's buffer grows to at most."""
    return window_size + max(1, window_size // 8)


def grown_rows(rows: int, window_size: int) -> int:
    """Rows that a buffer of `rows` grows to when it is full."""
    return min(buffer_rows(window_size), rows + max(_GROW_ROWS, rows // 8))
