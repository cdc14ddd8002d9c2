"""`LayerState`: a session's interface to a layer's cache of any kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specache_fx.runtime.kernels import DecodeInputs, LaneInputs, Originals
from specache_fx.runtime.layers.layout import Arena, LayerTensors
from specache_fx.runtime.layers.masks import WindowMask
from specache_fx.runtime.layers.sink_rows import SinkRows


@dataclass(slots=True, kw_only=True)
class LayerCall(LaneInputs):
    """One attention of a step, whatever the layer keeps.

    Attributes:
        staged: Rows that were prefetched, and their tokens; None where none were.
        window_masks: Of a layer that keeps a window: the model's mask, one a lane; None where it has none.
            `visible` takes their place for `inputs_at_any_length`.
    """

    staged: tuple[torch.Tensor, torch.Tensor] | None = None
    window_masks: Sequence[WindowMask | None] = ()


class LayerState(ABC):
    """One layer's keys, `[batch, num_kv_heads, kv_len, key_dim]`, and values, `[..., value_dim]`, in one arena.

    Args:
        arena: The layer's memory, empty.

    Attributes:
        is_exact: All of it is on the device at 16 bits: nothing is selected, fetched or waited for.
        num_quantized: Tokens in the low-bit copy, the oldest.
        window_len: Rows of `tensors.window` in use: the next pair comes behind them.
        sinks: 16-bit rows of quantised tokens that stay on the device; None where none do.
        originals: The host's pairs, where attention reads some in the step that needs them; None elsewhere.
    """

    is_exact: bool
    sinks: SinkRows | None = None
    originals: Originals | None = None

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.num_quantized = self.window_len = 0

    @property
    def kv_len(self) -> int:
        """Tokens that it has had, whether it keeps them or not."""
        return self.num_quantized + self.window_len

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self._arena.layout.nbytes

    @property
    def tensors(self) -> LayerTensors:
        """All that is on the device; the same object until it lies elsewhere."""
        return self._arena.tensors

    @property
    def room(self) -> int:
        """Tokens that the arena has room for: in codes and, behind them, in the window."""
        layout = self._arena.layout
        return layout.num_groups * self._arena.quantizer.group_size + layout.window_rows

    @abstractmethod
    def make_room(self, rows: int) -> None:
        """Have so many rows free in the window."""

    def was_appended(self) -> None:
        """A pair was written behind the window's last one."""
        self.window_len += 1

    def write_next(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a pair, `[batch, num_kv_heads, 1, dim]` each, one row behind the free one. It is not counted."""
        for rows, side in zip(self.tensors.window, (key, value), strict=True):
            rows.narrow(2, self.window_len + 1, 1).copy_(side)

    @abstractmethod
    def append(
        self, key: torch.Tensor, value: torch.Tensor, hold: bool = False, kv_len: int | None = None
    ) -> None:
        """Append new pairs: a prompt, a chunk, or one decoded token.

        Args:
            key: `[batch, num_kv_heads, q_len, key_dim]`.
            value: `[batch, num_kv_heads, q_len, value_dim]`.
            hold: Quantise nothing until the next append: the padding is known then.
            kv_len: Tokens afterwards, where these are the rest of more; by default so many more than before.

        Raises:
            HostMemoryError: If the host tier can't take the pairs that leave the device.
        """

    @abstractmethod
    def inputs(self, call: LayerCall) -> DecodeInputs:
        """A kernel's inputs in a decode step."""

    @abstractmethod
    def inputs_at_any_length(self, call: LayerCall) -> DecodeInputs:
        """As `inputs`, as if the arena were full: for kernels that are told the lengths elsewhere."""

    def masked_rows(
        self, masks: Sequence[WindowMask | None], independent: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A step's mask of a window, and the bias of its scores; None of a layer that keeps all tokens.

        Args:
            masks: The model's own, one a lane; None hides and adds nothing. Lane 1's covers the window as it will be.
            independent: The lanes are the same token and don't see each other (pre-decode).

        Returns:
            Bool `[lanes, batch, window_len + lanes]`: the window's rows, then the lanes' own pairs. And
            `[lanes, batch or 1, num_heads or 1, window_len + lanes]` of the masks' dtype; None where there is none.

        Raises:
            UnsupportedGraphError: If a mask is not as wide as the window.
        """
        return None, None

    @abstractmethod
    def history(
        self, kv_len: int | None = None, new: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's past at this length, or at an earlier one: fresh tensors.

        Args:
            kv_len: The earlier length.
            new: Keys and values to append to it; the layer does not keep them.

        Raises:
            CacheHandleError: If it would need pairs that are gone.
        """

    def check_truncate(self, kv_len: int) -> None:  # noqa: B027  (most layers can always go back)
        """Make sure that `truncate` can be served.

        Raises:
            CacheHandleError: If it would need pairs that are gone.
        """

    @abstractmethod
    def truncate(self, kv_len: int) -> None:
        """Keep the first `kv_len` tokens (crop, or undoing a step that failed midway)."""

    def reorder(self, rows: torch.Tensor) -> None:
        """Set batch row i to the former row `rows[i]`, int64 `[batch]` on the device."""
        self._arena.reorder(rows)

    @abstractmethod
    def snapshot(self) -> dict[str, torch.Tensor]:
        """The tensors on the device, by name: views, and `sizes`, int64 on the CPU.

        Memory that holds no token is left out: it may have belonged to something else.
        """

    @abstractmethod
    def restore(self, held: Mapping[str, torch.Tensor]) -> None:
        """Take over a `snapshot`, in an arena as large; the layer is empty, and `held` on any device.

        Raises:
            ValueError: If `held` has other tensors than a layer of this form.
        """


def copy_exactly(new: torch.Tensor, old: torch.Tensor, name: str) -> None:
    """Copy a tensor of the same shape and dtype.

    Raises:
        ValueError: If it has another.
    """
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(f"{name} is {old.dtype} {tuple(old.shape)}: expected {new.dtype} {tuple(new.shape)}")
    new.copy_(old)


def restore_exactly(mine: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor], name: str) -> None:
    """Copy a `LayerState.snapshot`, without `sizes`, to a layer's own tensors.

    Raises:
        ValueError: If they are others.
    """
    if mine.keys() | {"sizes"} != held.keys():
        raise ValueError(f"{name} has {sorted(mine)} and was given {sorted(held)}")
    for part, tensor in mine.items():
        copy_exactly(tensor, held[part], f"{part} of {name}")
