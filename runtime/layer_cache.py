"""`LayerCache`: one layer's KV cache in its three tiers (codes, 16-bit window, host rows)."""

from __future__ import annotations

from typing import Any

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.host_cache import HostCache
from specache_fx.runtime.key_mask import KeyMask
from specache_fx.runtime.planes import PlaneStore
from specache_fx.runtime.quant import Quantizer
from specache_fx.runtime.sink_rows import SinkRows

# Tokens quantised at a time in prefill: bounds the float32 temporaries of quantisation, whatever the prompt's length.
_QUANTIZE_CHUNK_TOKENS = 4096


class LayerCache:
    """One layer's keys and values: quantised oldest tokens, then a 16-bit window of the newest.

    Which tokens are quantised is a function of the length alone (`SpecacheConfig.num_quantized`); of a resident layer
    none are, and its window is the whole cache. Keys are `[batch, num_kv_heads, kv_len, key_dim]`, values
    `[batch, num_kv_heads, kv_len, value_dim]`, of the model's dtype.

    Args:
        config: The session's options.
        quantizer: Makes the codes.
        host: Keeps the 16-bit originals of the quantised tokens; None where the policy keeps the codes alone.
        layer: Index of this layer's rows in `host`.
        key_mask: The session's, which knows the padding of what is appended before it is.
        resident: The layer stays whole on the device (`SpecacheConfig.resident_layers`).

    Attributes:
        sinks: 16-bit rows of quantised tokens that stay on the device; None where none do.
    """

    def __init__(
        self,
        config: SpecacheConfig,
        quantizer: Quantizer,
        host: HostCache | None,
        layer: int,
        key_mask: KeyMask,
        resident: bool = False,
    ) -> None:
        self.config = config
        self.quantizer = quantizer
        self.host = host
        self.layer = layer
        self.resident = resident
        self.sinks: SinkRows | None = None
        self._key_mask = key_mask
        self.key_planes = PlaneStore(config.group_size, quantizer.sequence_key_planes)
        self.value_planes = PlaneStore(config.group_size)
        self.kernel_memory: dict[str, Any] = {}  # see `DecodeInputs.memory`
        self._window_key = torch.empty(0)
        self._window_value = torch.empty(0)
        self.window_len = 0

    @property
    def num_quantized(self) -> int:
        """Tokens in the low-bit copy."""
        return self.key_planes.num_tokens

    def _num_quantized_at(self, kv_len: int) -> int:
        return 0 if self.resident else self.config.num_quantized(kv_len)

    @property
    def kv_len(self) -> int:
        """Tokens held in all."""
        return self.num_quantized + self.window_len

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: codes with their scales, sinks, and the window."""
        window = self._window_key.untyped_storage().nbytes() + self._window_value.untyped_storage().nbytes()
        sinks = 0 if self.sinks is None else self.sinks.nbytes
        return self.key_planes.nbytes + self.value_planes.nbytes + window + sinks

    @property
    def window_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of the window, `[batch, num_kv_heads, room, dim]` each; it is their first `window_len` rows."""
        return self._window_key, self._window_value

    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The 16-bit keys and values of the newest tokens; views, no copy."""
        if self._window_key.dim() != 4:
            return self._window_key, self._window_value  # nothing yet
        return self._window_key.narrow(2, 0, self.window_len), self._window_value.narrow(
            2, 0, self.window_len
        )

    @property
    def has_room(self) -> bool:
        """Whether one more pair just goes to the window, and nothing else changes."""
        window = self._window_key
        full = window.dim() != 4 or self.window_len == window.shape[2]
        if full or (self.config.sink_tokens and not self.resident):
            return False
        return self._num_quantized_at(self.kv_len + 1) == self.num_quantized

    def was_appended(self) -> None:
        """A pair was written behind the window's last one, where there was room."""
        self.window_len += 1

    def append(self, key: torch.Tensor, value: torch.Tensor, hold: bool = False) -> None:
        """Append new pairs (a prompt, a chunk, or one decoded token) and quantise and offload what overflows.

        Args:
            key: `[batch, num_kv_heads, q_len, key_dim]`.
            value: `[batch, num_kv_heads, q_len, value_dim]`.
            hold: Keep all of it in the window until the next append: what is padding is known then.

        Raises:
            HostMemoryError: If the host tier can't take the overflow.
        """
        if self.sinks is None and self.config.sink_tokens and not self.resident:
            self.sinks = SinkRows(key, value, self.config.sink_tokens)
        kv_len = self.kv_len + key.shape[2]
        overflow = 0 if hold else self._num_quantized_at(kv_len) - self.num_quantized
        if not overflow:
            self._extend_window(key, value)
            return
        self.kernel_memory.clear()  # else what it holds would live on beside what replaces it
        if self.window_len:
            window_key, window_value = self.window()
            key, value = torch.cat([window_key, key], 2), torch.cat([window_value, value], 2)
        held = self.num_quantized
        try:
            real = self._key_mask.at(kv_len)
            self._quantize(key[:, :, :overflow], value[:, :, :overflow], real)
            if self.sinks is not None:
                self.sinks.offer(held, key[:, :, :overflow], value[:, :, :overflow], real)
            window = self._window_of(key[:, :, overflow:]), self._window_of(value[:, :, overflow:])
        except BaseException:
            self._keep_quantized(held)  # all of it or nothing: a step that failed may be repeated
            raise
        self._set_window(*window, key.shape[2] - overflow)

    def _extend_window(self, key: torch.Tensor, value: torch.Tensor) -> None:
        new_len = self.window_len + key.shape[2]
        if self._window_key.dim() != 4 or self._window_key.shape[2] < new_len:
            held_key, held_value = self.window() if self.window_len else (key[:, :, :0], value[:, :, :0])
            grown = self._window_of(held_key, key), self._window_of(held_value, value)
            self._set_window(*grown, new_len)
            return
        # `narrow` and `copy_`: two operators a side, where an assignment to a slice takes four.
        self._window_key.narrow(2, self.window_len, key.shape[2]).copy_(key)
        self._window_value.narrow(2, self.window_len, key.shape[2]).copy_(value)
        self.window_len = new_len

    def _window_of(self, *parts: torch.Tensor) -> torch.Tensor:
        """A fresh buffer that begins with these tokens, one part after the other."""
        batch, heads, _, dim = parts[0].shape
        tokens = sum(part.shape[2] for part in parts)
        # A prompt takes exactly what it needs; the first decoded token makes room for a whole group.
        room = tokens
        if self._window_key.dim() == 4:
            room = max(tokens, grown_rows(self._window_key.shape[2], self.config, self.resident))
        buffer = parts[0].new_empty((batch, heads, room, dim))
        at = 0
        for part in parts:
            buffer[:, :, at : at + part.shape[2]] = part
            at += part.shape[2]
        return buffer

    def _set_window(self, key: torch.Tensor, value: torch.Tensor, window_len: int) -> None:
        self._window_key, self._window_value, self.window_len = key, value, window_len
        self.kernel_memory.clear()

    def _keep_quantized(self, num_tokens: int) -> None:
        """Forget the quantised tokens from `num_tokens` on, in every tier."""
        self.key_planes.truncate(num_tokens)
        self.value_planes.truncate(num_tokens)
        if self.sinks is not None:
            self.sinks.truncate(num_tokens)
        if self.host is not None and self.host.length(self.layer) > num_tokens:
            self.host.truncate(self.layer, num_tokens)

    def _quantize(self, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None) -> None:
        """Offload and quantise whole groups, the oldest of the window; `real` is the padding mask of all tokens."""
        if self.host is not None:
            key_dim, value_dim = self.config.placement.host_dims(key.shape[3], value.shape[3])
            self.host.append(self.layer, key[..., :key_dim], value[..., :value_dim])
        tokens, group_size = key.shape[2], self.config.group_size
        chunk = max(_QUANTIZE_CHUNK_TOKENS // group_size, 1) * group_size
        total_groups = self.key_planes.num_groups + tokens // group_size
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            size = part.stop - part.start
            shown = None if real is None else real[:, : self.num_quantized + size]
            held = self.key_planes.view()
            for store, planes in (
                (self.key_planes, self.quantizer.quantize_more_keys(key[:, :, part], held, shown)),
                (self.value_planes, self.quantizer.quantize_value(value[:, :, part])),
            ):
                if start == 0 and size < tokens:
                    store.reserve(total_groups, planes, size // group_size)
                store.put(planes, size)

    def history(self, kv_len: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values at 16 bits, for exact attention (extend), or those of the first `kv_len` tokens.

        Without a host tier the quantised tokens come back as their low-bit copies, which are all there is but for
        `sinks`.

        Returns:
            Fresh tensors `[batch, num_kv_heads, kv_len, key_dim]` and `[..., value_dim]` on the device.
        """
        window_key, window_value = self.window()
        if not self.num_quantized:
            return window_key[:, :, :kv_len].clone(), window_value[:, :, :kv_len].clone()
        key, value = self.originals(0, self.num_quantized)
        key = torch.cat([key, window_key], 2)  # one after the other: at no time both twice
        value = torch.cat([value, window_value], 2)
        return key[:, :, :kv_len], value[:, :, :kv_len]

    def originals(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best pairs there are of quantised tokens `start` to `stop`, on the device."""
        window = self._window_key
        if self.host is not None:
            key, value = (
                side.to(window.device, window.dtype) for side in self.host.read(self.layer, start, stop)
            )
            if not self.config.placement.host_keys:  # they are on the device, exactly
                planes, key_dim = self.key_planes.view(), window.shape[3]
                key = self.quantizer.dequantize_key(planes, key_dim, window.dtype)[:, :, start:stop]
            return key, value
        key = self.quantizer.dequantize_key(self.key_planes.view(), self._window_key.shape[3], window.dtype)
        value = self.quantizer.dequantize_value(
            self.value_planes.view(), self._window_value.shape[3], window.dtype
        )
        if self.sinks is not None:
            key, value = self.sinks.restore(key, value)
        return key[:, :, start:stop], value[:, :, start:stop]

    def take(self, source: LayerCache, rows: torch.Tensor) -> None:
        """Hold what `source` holds, of its batch rows `rows`: a reordering of this cache, or a copy of another.

        Args:
            source: This cache itself, or the cache of the same layer in another session, with as many tokens.
            rows: int64 `[batch]` on the device: row i becomes a copy of the source's row `rows[i]`. Of another
                session's cache it may be any number of rows.

        Raises:
            HostMemoryError: If the host tier can't take a copy.
        """
        if self.host is not None and source.host is not None:
            if source is self:
                self.host.reorder(self.layer, rows.cpu())
            else:
                self.host.take(self.layer, source.host, rows.cpu())
        self.kernel_memory.clear()
        self.key_planes.take(source.key_planes, rows)
        self.value_planes.take(source.value_planes, rows)
        self.sinks = None if source.sinks is None else source.sinks.taken(rows)
        window_value = source._window_value.index_select(0, rows)
        self._set_window(source._window_key.index_select(0, rows), window_value, source.window_len)

    def truncate(self, kv_len: int) -> None:
        """Keep the first `kv_len` tokens (crop, or undoing a step that failed midway).

        Tokens that leave the low-bit copy return to the window at 16 bits, from the host.
        """
        if kv_len >= self.kv_len:
            return
        # Where tokens were held (`append`), fewer are quantised than the length says.
        keep = min(self._num_quantized_at(kv_len), self.num_quantized)
        window_key, window_value = self.window()
        if keep == self.num_quantized:
            self.window_len = kv_len - keep
            return
        stop = min(kv_len, self.num_quantized)
        key, value = self.originals(keep, stop)
        rest = kv_len - stop
        window = (
            self._window_of(key, window_key[:, :, :rest]),
            self._window_of(value, window_value[:, :, :rest]),
        )
        self._keep_quantized(keep)
        self._set_window(*window, kv_len - keep)


def grown_rows(rows: int, config: SpecacheConfig, resident: bool) -> int:
    """Rows that a window's buffer of `rows` grows to when it is full; a resident layer's by an eighth at least."""
    most = config.residual_length + config.group_size
    return rows + max(most, rows // 8) if resident else most
