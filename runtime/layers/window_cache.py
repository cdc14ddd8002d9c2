"""`WindowCache`: the pairs of a layer that attends to its newest tokens alone, exact and on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from specache_fx.errors import CacheHandleError, UnsupportedGraphError
from specache_fx.runtime.kernels import DecodeInputs
from specache_fx.runtime.layers.layer_state import LayerCall, LayerState, restore_exactly
from specache_fx.runtime.layers.layout import Arena
from specache_fx.runtime.layers.masks import WindowMask, by_lane

_GROW_ROWS = 64


class WindowCache(LayerState):
    """The newest `window - 1` keys and values of a layer (a sliding window, or the chunk that is being written).

    With the query's own pair these are all that the model itself keeps. Nothing is quantised, offloaded or selected.
    The arena has an eighth more rows, two at least: pairs move to its front when it is full, and not with every token.
    The last token can be taken back (`truncate`). The oldest of the rows in use may have left the window.

    Args:
        arena: The layer's memory, empty.
        window: Tokens that a query reaches, its own included.
    """

    is_exact = True
    kv_len = 0

    def __init__(self, arena: Arena, window: int) -> None:
        super().__init__(arena)
        self.window_size = window - 1

    @property
    def held(self) -> int:
        """Pairs that a query attends to, without its own."""
        return min(self.kv_len, self.window_size)

    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest pairs in order, `[batch, num_kv_heads, held, dim]` each; views, no copy."""
        return self._rows(self.window_len - self.held, self.window_len)

    def _rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._arena.tensors.window
        return key[:, :, start:stop], value[:, :, start:stop]

    def inputs(self, call: LayerCall) -> DecodeInputs:
        """See `LayerState`: no codes, nothing staged."""
        visible, bias = self._masked(call.window_masks, call.independent_lanes)
        return self._inputs(call, self.window(), self.held, visible, bias)

    def inputs_at_any_length(self, call: LayerCall) -> DecodeInputs:
        """See `LayerState`; `call.visible` hides rows that have left the window."""
        return self._inputs(call, self.tensors.window, self.room, call.visible, call.bias)

    def _inputs(
        self,
        call: LayerCall,
        rows: tuple[torch.Tensor, torch.Tensor],
        window_len: int,
        visible: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> DecodeInputs:
        hidden = {"key_mask": None, "visible": visible, "bias": bias, "scored_lanes": 0}
        return DecodeInputs(
            **(call.lane_inputs() | hidden),
            quantizer=self._arena.quantizer,
            key_planes=(),
            value_planes=(),
            num_quantized=0,
            window_rows=rows,
            window_len=window_len,
        )

    def history(
        self, kv_len: int | None = None, new: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerState`."""
        kv_len = self.kv_len if kv_len is None else kv_len
        self.check_truncate(kv_len)
        end = self.window_len - (self.kv_len - kv_len)
        held = self._rows(end - min(kv_len, self.window_size), end)
        parts = [held] if new is None else [held, new]
        key, value = (torch.cat(side, 2) for side in zip(*parts, strict=True))
        return key, value

    def append(
        self, key: torch.Tensor, value: torch.Tensor, hold: bool = False, kv_len: int | None = None
    ) -> None:
        """See `LayerState`."""
        q_len = key.shape[2]
        new_len = min(q_len, self.window_size)
        self._make_room(new_len, self.window_size - (0 if q_len == 1 else new_len))
        needed = self.window_len + new_len
        for rows, side in zip(self._rows(self.window_len, needed), (key, value), strict=True):
            rows.copy_(side[:, :, q_len - new_len :])
        self.window_len = needed
        self.kv_len = self.kv_len + q_len if kv_len is None else kv_len

    def make_room(self, rows: int) -> None:
        """See `LayerState`."""
        # The whole window stays in place, for `truncate`.
        self._make_room(rows, self.window_size)

    def was_appended(self) -> None:
        """See `LayerState`."""
        super().was_appended()
        self.kv_len += 1

    def _make_room(self, rows: int, keep: int) -> None:
        """Have so many rows free; where they don't fit, the `keep` newest pairs stay."""
        if self.window_len + rows > buffer_rows(self.window_size):
            self._compact(keep)
        needed, room = self.window_len + rows, self.room
        if room < needed:  # a prompt takes no spare room
            self._arena.resize(0, max(needed, grown_rows(room, self.window_size)) if self.kv_len else needed)

    def _compact(self, keep: int) -> None:
        """Move the newest pairs to the front."""
        newest = self._rows(self.window_len - keep, self.window_len)
        for rows, side in zip(self._rows(0, keep), newest, strict=True):
            rows.copy_(side.clone())
        self.window_len = keep

    def check_truncate(self, kv_len: int) -> None:
        """See `LayerState`."""
        if min(kv_len, self.window_size) > self.window_len - max(0, self.kv_len - kv_len):
            raise CacheHandleError(
                f"The KV cache can't go back from {self.kv_len} tokens to {kv_len}: a layer with a window of"
                f" {self.window_size + 1} tokens has dropped pairs that it would need again. Crop such a cache before"
                " its window is full, or start from the prompt."
            )

    def truncate(self, kv_len: int) -> None:
        """See `LayerState`."""
        self.check_truncate(kv_len)
        if kv_len < self.kv_len:
            self.window_len -= self.kv_len - kv_len
            self.kv_len = kv_len

    def snapshot(self) -> dict[str, torch.Tensor]:
        """See `LayerState`; `sizes`: rows of the arena, filled ones, tokens."""
        sizes = self._arena.layout.window_rows, self.window_len, self.kv_len
        return {"sizes": torch.tensor(sizes, device="cpu"), **self._held()}

    def _held(self) -> dict[str, torch.Tensor]:
        return dict(zip(("key", "value"), self._rows(0, self.window_len), strict=True))

    def restore(self, held: Mapping[str, torch.Tensor]) -> None:
        """See `LayerState`."""
        room, self.window_len, self.kv_len = held["sizes"].tolist()
        self._arena.resize(0, room)
        restore_exactly(self._held(), held, f"a layer with a window of {self.window_size + 1}")

    def masked_rows(
        self, masks: Sequence[WindowMask | None], independent: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `LayerState`: as `masked`, and rows that have left the window are hidden."""
        visible, bias = self._masked(masks, independent)
        if visible is None:
            shape = len(masks), self._arena.batch, self.held + len(masks)
            visible = self.tensors.window[0].new_ones(shape, dtype=torch.bool)
        left = (self.window_len - self.held, 0)
        return F.pad(visible, left), None if bias is None else F.pad(bias, left)

    def _masked(
        self, masks: Sequence[WindowMask | None], independent: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As `masked_rows`, of the `held` newest rows alone. A single lane that attends to all of them gets None.

        Lane 1 is one token later: the oldest pair has left its window when that is full, and lane 0's is in it.
        """
        # Pairs that a lane finds in its window, besides its own.
        found = [
            min(self.kv_len + (0 if independent else lane), self.window_size) for lane in range(len(masks))
        ]
        for mask, pairs in zip(masks, found, strict=True):
            if mask is not None and mask.width != pairs + 1:
                raise UnsupportedGraphError(
                    f"The mask of a layer with a window covers {mask.width} keys, where the layer has {pairs} and"
                    ' the token\'s own. Compile this model with backend="inductor".'
                )
        visible = None
        if len(masks) > 1 or (masks[0] is not None and masks[0].seen is not None):
            ones = self.tensors.window[0].new_ones((self._arena.batch, max(found) + 1), dtype=torch.bool)
            seen = [None if mask is None else mask.seen for mask in masks]
            rows = [
                ones[:, : pairs + 1] if row is None else row for row, pairs in zip(seen, found, strict=True)
            ]
            visible = by_lane(rows, self.held, independent)
        biases = [None if mask is None else mask.bias for mask in masks]
        return visible, by_lane(biases, self.held, independent)


def buffer_rows(window_size: int) -> int:
    """Rows that a window's buffer grows to at most."""
    return window_size + max(2, window_size // 8)


def grown_rows(rows: int, window_size: int) -> int:
    """Rows that a buffer of `rows` grows to when it is full."""
    return min(buffer_rows(window_size), rows + max(_GROW_ROWS, rows // 8))
