"""`Layout`: where the tensors of one layer's cache lie in its arena, one piece of device memory.

The cache allocates by it, and `plan()` adds it up: what is planned is what is allocated.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specache_fx.errors import HostMemoryError
from specache_fx.runtime.quant import Planes, Quantizer
from specache_fx.runtime.quant.base import KVKind

_ALIGN_BYTES = 64  # a cache line; vectors of any kernel


class LayerShape(NamedTuple):
    """Form of a layer's KV pairs, for any batch."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # tokens that a query reaches, where the layer keeps no more

    def tokens(self, kv_len: int) -> int:
        """Tokens that the layer keeps of `kv_len`."""
        return kv_len if self.window is None else min(kv_len, self.window - 1)


@dataclass(frozen=True)
class Place:
    """One tensor of an arena.

    Attributes:
        shape: Its sizes.
        dtype: Its dtype.
        offset: Bytes before it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, without the padding of the last line."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, arena: torch.Tensor) -> torch.Tensor:
        """The tensor: a view of the arena, uint8 `[nbytes]`."""
        return arena[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerTensors:
    """A layer's tensors: views of its arena.

    Attributes:
        key_planes: Codes of keys, with room for all groups (`Quantizer`).
        value_planes: Codes of values.
        window: 16-bit keys and values, `[batch, num_kv_heads, window_rows, dim]` each.
        sinks: 16-bit pairs `[batch, num_kv_heads, sink_tokens, key_dim + value_dim]` and their tokens, int32 `[batch,
            sink_tokens]`.
    """

    key_planes: Planes
    value_planes: Planes
    window: tuple[torch.Tensor, torch.Tensor]
    sinks: tuple[torch.Tensor, torch.Tensor]

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """All of them, batch first; in those with rows of tokens these are dimension 2."""
        return *self.key_planes, *self.value_planes, *self.window, *self.sinks


class Layout:
    """Sizes to offsets.

    Args:
        quantizer: Makes the codes.
        shape: The layer's.
        batch: Sequences.
        dtype: Of keys and values.
        num_groups: Groups of tokens that there is room for in the codes.
        window_rows: Tokens that there is room for in the 16-bit window.
        sink_tokens: See `SpecacheConfig`.

    Attributes:
        nbytes: Bytes of the arena.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        shape: LayerShape,
        batch: int,
        dtype: torch.dtype,
        num_groups: int,
        window_rows: int,
        sink_tokens: int,
    ) -> None:
        self.num_groups, self.window_rows = num_groups, window_rows
        self.nbytes = 0
        heads = batch, shape.num_kv_heads
        sides: tuple[tuple[KVKind, int], ...] = (("key", shape.key_dim), ("value", shape.value_dim))
        self._forms = {kind: quantizer.plane_forms(dim, dtype, kind) for kind, dim in sides}
        self._planes = {
            kind: [self._place((*heads, form.held(num_groups), form.width), form.dtype) for form in forms]
            for kind, forms in self._forms.items()
        }
        self._window = [self._place((*heads, window_rows, dim), dtype) for _, dim in sides]
        self._sinks = (
            self._place((*heads, sink_tokens, shape.key_dim + shape.value_dim), dtype),
            self._place((batch, sink_tokens), torch.int32),
        )

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
        place = Place(shape, dtype, self.nbytes)
        self.nbytes += -(-place.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return place

    def tensors(self, arena: torch.Tensor) -> LayerTensors:
        """Views of an arena, uint8 `[nbytes]` on the device."""
        key, value = (tuple(place.of(arena) for place in places) for places in self._planes.values())
        window_key, window_value = (place.of(arena) for place in self._window)
        rows, indices = (place.of(arena) for place in self._sinks)
        return LayerTensors(key, value, (window_key, window_value), (rows, indices))

    def codes(self, tensors: LayerTensors, num_groups: int) -> tuple[Planes, Planes]:
        """Of an arena's planes of keys and of values the rows of the first `num_groups` groups; views."""
        planes = zip((tensors.key_planes, tensors.value_planes), self._forms.values(), strict=True)
        key, value = (
            tuple(plane.narrow(2, 0, form.held(num_groups)) for plane, form in zip(side, forms, strict=True))
            for side, forms in planes
        )
        return key, value

    def put(self, planes: Planes, kind: KVKind, group: int, new: Planes) -> None:
        """Write the codes of groups from number `group` on, and the sequence's planes, to an arena."""
        for plane, form, rows in zip(planes, self._forms[kind], new, strict=True):
            plane.narrow(2, 0 if form.of_sequence else group * form.rows, rows.shape[2]).copy_(rows)


_shared_layout = functools.lru_cache(maxsize=64)(Layout)
"""Equal layers of a session share one: in a prompt each would make two."""


class Arena:
    """The device memory of one layer, exchanged for larger one as the layer grows.

    Args:
        quantizer: See `Layout`.
        shape: See `Layout`.
        batch: See `Layout`.
        dtype: See `Layout`.
        device: Where it is.
        sink_tokens: See `Layout`.

    Attributes:
        layout: Where its tensors are.
        tensors: All of them; another object when they lie elsewhere.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        shape: LayerShape,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        sink_tokens: int = 0,
    ) -> None:
        self.quantizer, self.shape, self.batch, self.dtype = quantizer, shape, batch, dtype
        self.device, self.sink_tokens = device, sink_tokens
        self.layout, self.tensors = self._allocate(0, 0)

    def _allocate(self, num_groups: int, window_rows: int) -> tuple[Layout, LayerTensors]:
        sizes = num_groups, window_rows, self.sink_tokens
        layout = _shared_layout(self.quantizer, self.shape, self.batch, self.dtype, *sizes)
        # No inference tensor, whoever asks first: it is written in any mode.
        with torch.inference_mode(False):
            # Zeros: `AtenSteps` multiplies what holds no token by 0, and NaN would survive that.
            try:
                memory = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self.device)
            except RuntimeError as error:
                if self.device.type != "cpu":  # CUDA's error says what is needed
                    raise
                raise HostMemoryError(
                    f"There is no memory for a layer's cache of {layout.nbytes:,} bytes: free some, shorten the"
                    " context, or ask for less by reserve=, residual_length=, group_size= or sink_tokens=."
                ) from error
            return layout, layout.tensors(memory)

    def resize(self, num_groups: int, window_rows: int) -> None:
        """Have so much room, with the rows that fit into both."""
        before = self.tensors
        self.layout, self.tensors = self._allocate(num_groups, window_rows)
        for new, old in zip(self.tensors.all, before.all, strict=True):
            _copy_rows(new, old)

    def reorder(self, rows: torch.Tensor) -> None:
        """Set batch row i to the former row `rows[i]`, int64 `[batch]` on the device."""
        for tensor in self.tensors.all:
            tensor.copy_(tensor.index_select(0, rows))


def _copy_rows(new: torch.Tensor, old: torch.Tensor) -> None:
    """Copy the rows of tokens that both have; tensors without such rows, whole."""
    if old.numel() == 0:
        return
    if new.dim() == 4:
        rows = min(new.shape[2], old.shape[2])
        new, old = new.narrow(2, 0, rows), old.narrow(2, 0, rows)
    new.copy_(old)
