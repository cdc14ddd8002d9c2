"""`LayerCache`: one layer's KV cache in its three tiers (codes, 16-bit window, host rows)."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.host.host_cache import HostCache
from specache_fx.runtime.kernels import DecodeInputs, Originals
from specache_fx.runtime.layers.key_mask import KeyMask
from specache_fx.runtime.layers.layer_state import LayerCall, LayerState, restore_exactly
from specache_fx.runtime.layers.layout import Arena
from specache_fx.runtime.layers.sink_rows import SinkRows
from specache_fx.runtime.quant import Planes

# Tokens quantised at a time in prefill: bounds the float32 temporaries of quantisation, whatever the prompt's length.
_QUANTIZE_CHUNK_TOKENS = 4096
_KINDS = "key", "value"
_LEAST_GROWTH_TOKENS = 256


class LayerCache(LayerState):
    """One layer's keys and values: quantised oldest tokens, then a 16-bit window of the newest.

    The length alone decides which tokens are quantised (`SpecacheConfig.num_quantized`). Of a resident layer none are,
    and its window is the whole cache. Keys are `[batch, num_kv_heads, kv_len, key_dim]`, values
    `[batch, num_kv_heads, kv_len, value_dim]`, of the model's dtype. One arena (`Layout`) holds all that
    is on the device. A prompt takes exactly what it needs; then codes grow by `grown_tokens`, and the window to a group
    more than `residual_length`.

    Args:
        config: The session's options.
        arena: The layer's memory, empty.
        host: Keeps the 16-bit originals of the quantised tokens; None where the policy keeps the codes alone.
        layer: Index of this layer's rows in `host`.
        key_mask: The session's, which knows the padding of what is appended before it is.
        is_exact: The layer stays whole on the device (`SpecacheConfig.resident_layers`).

    Attributes:
        quantizer: Makes the codes.
    """

    def __init__(
        self,
        config: SpecacheConfig,
        arena: Arena,
        host: HostCache | None,
        layer: int,
        key_mask: KeyMask,
        is_exact: bool = False,
    ) -> None:
        super().__init__(arena)
        self.config, self.host, self.layer, self.is_exact = config, host, layer, is_exact
        self.quantizer, self._key_mask = arena.quantizer, key_mask
        self._views: tuple[Planes, Planes] | None = None
        self.sinks = self._find_sinks()
        if self.sinks is not None:
            self.sinks.clear()

    def _find_sinks(self) -> SinkRows | None:
        return SinkRows(*self.tensors.sinks) if self._arena.sink_tokens else None

    def num_quantized_at(self, kv_len: int) -> int:
        """Tokens in the low-bit copy when there are `kv_len`."""
        return 0 if self.is_exact else self.config.num_quantized(kv_len)

    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The 16-bit keys and values of the newest tokens; views, no copy."""
        key, value = self._arena.tensors.window
        return key.narrow(2, 0, self.window_len), value.narrow(2, 0, self.window_len)

    @property
    def planes(self) -> tuple[Planes, Planes]:
        """Codes of the quantised keys and values; views, the same until something is quantised or moved."""
        if self._views is None:
            self._views = self._arena.layout.codes(
                self._arena.tensors, self.num_quantized // self.config.group_size
            )
        return self._views

    def make_room(self, rows: int) -> None:
        """See `LayerState`."""
        self._make_room(self.num_quantized, self.window_len + rows)

    @property
    def originals(self) -> Originals | None:  # type: ignore[override]
        """See `LayerState`."""
        config, host, layer = self.config, self.host, self.layer
        if host is None or self.is_exact or not config.corrects:
            return None
        assert config.key_share is not None and config.value_share is not None
        table, num_read = host.readable(layer, self.tensors.window[0].device)
        return Originals(
            table=table,
            length=host.length(layer),
            read=functools.partial(host.read, layer),
            key_share=config.key_share,
            value_share=config.value_share,
            num_read=num_read,
        )

    def quantize_overflow(self) -> None:
        """Quantise and offload the pairs that `was_appended` has pushed out of the window, if any.

        Raises:
            HostMemoryError: If the host tier can't take it.
        """
        if self.num_quantized_at(self.kv_len) > self.num_quantized:
            key, value = self._arena.tensors.window
            self.append(key.narrow(2, 0, 0), value.narrow(2, 0, 0))

    def inputs(self, call: LayerCall) -> DecodeInputs:
        """See `LayerState`. The layer's sinks go to the kernel with the staged rows."""
        return self._inputs(call, self.planes, self.num_quantized, self.window_len)

    def inputs_at_any_length(self, call: LayerCall) -> DecodeInputs:
        """See `LayerState`."""
        tensors, layout = self._arena.tensors, self._arena.layout
        planes, codes = (tensors.key_planes, tensors.value_planes), layout.num_groups * self.config.group_size
        return self._inputs(call, planes, codes, layout.window_rows)

    def _inputs(
        self, call: LayerCall, planes: tuple[Planes, Planes], num_quantized: int, window_len: int
    ) -> DecodeInputs:
        staged = call.staged if self.sinks is None else self.sinks.staged(call.staged)
        rows, indices = (None, None) if staged is None else staged
        return DecodeInputs(
            **call.lane_inputs(),
            quantizer=self.quantizer,
            key_planes=planes[0],
            value_planes=planes[1],
            num_quantized=num_quantized,
            window_rows=self.tensors.window,
            window_len=window_len,
            staged_rows=rows,
            staged_indices=indices,
            aggregation=self.config.aggregation,
            originals=self.originals,
        )

    def append(
        self, key: torch.Tensor, value: torch.Tensor, hold: bool = False, kv_len: int | None = None
    ) -> None:
        """See `LayerState`: the overflow is quantised and offloaded. All is kept, so `kv_len` says nothing new."""
        kv_len = self.kv_len + key.shape[2]
        overflow = 0 if hold else self.num_quantized_at(kv_len) - self.num_quantized
        held, rest = self.num_quantized, self.window_len + key.shape[2] - overflow
        self._make_room(held + overflow, rest)
        window_key, window_value = self._arena.tensors.window
        if not overflow:
            # `narrow` and `copy_`: two operators a side, where an assignment to a slice takes four.
            window_key.narrow(2, self.window_len, key.shape[2]).copy_(key)
            window_value.narrow(2, self.window_len, key.shape[2]).copy_(value)
            self.window_len = rest
            return
        if self.window_len:
            key, value = (torch.cat(pair, 2) for pair in zip(self.window(), (key, value), strict=True))
        try:
            real = self._key_mask.at(kv_len)
            self._quantize(key, value, overflow, real)
            if self.sinks is not None:
                self.sinks.offer(held, key[:, :, :overflow], value[:, :, :overflow], real)
        except BaseException:
            self._keep_quantized(held)  # all of it or nothing: a step that failed may be repeated
            raise
        self._set_window(key[:, :, overflow:], value[:, :, overflow:])

    def _make_room(self, num_quantized: int, window_len: int) -> None:
        """Have an arena for so many tokens: this one, or a larger one with the same in it."""
        groups, rows, old = num_quantized // self.config.group_size, window_len, self._arena.layout
        if groups <= old.num_groups and rows <= old.window_rows:
            return
        if self.kv_len:
            if groups > old.num_groups:
                groups = max(groups, grown_groups(old.num_groups, self.config.group_size))
            # The window is grown with the codes, so that a step moves all of it once.
            rows = max(rows, self.window_len, grown_rows(old.window_rows, self.config, self.is_exact))
        if self.config.reserve:
            least = reserved(self.config, self.is_exact)
            groups, rows = max(groups, least[0]), max(rows, least[1])
        self._resize(groups, rows)

    def _resize(self, num_groups: int, window_rows: int) -> None:
        """Move to memory with so much room."""
        self._arena.resize(num_groups, window_rows)
        self._moved()

    def _set_window(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Have these pairs in the window, and none else. They are no views of it."""
        for rows, side in zip(self._arena.tensors.window, (key, value), strict=True):
            rows.narrow(2, 0, side.shape[2]).copy_(side)
        self.window_len = key.shape[2]
        # Tokens that were held (`append`) took more than a window has.
        most = max(self.window_len, grown_rows(0, self.config, resident=False))
        if self._arena.layout.window_rows > most:
            self._resize(self._arena.layout.num_groups, most)

    def _moved(self) -> None:
        """Drop everything made of tensors: they lie elsewhere now, or are longer."""
        self._views = None
        self.sinks = self._find_sinks()

    def _keep_quantized(self, num_tokens: int) -> None:
        """Forget the quantised tokens from `num_tokens` on, in every tier."""
        self.num_quantized = num_tokens
        self._moved()
        if self.sinks is not None:
            self.sinks.truncate(num_tokens)
        if self.host is not None and self.host.length(self.layer) > num_tokens:
            self.host.truncate(self.layer, num_tokens)

    def _quantize(
        self, key: torch.Tensor, value: torch.Tensor, tokens: int, real: torch.Tensor | None
    ) -> None:
        """Offload and quantise the oldest `tokens` of the window, whole groups; `real` is the mask of all tokens.

        Of the keys behind them, `residual_length` are always there: a row's first tokens may be among these.
        """
        if self.host is not None:
            key_dim, value_dim = self.config.placement.host_dims(key.shape[3], value.shape[3])
            self.host.append(self.layer, key[:, :, :tokens, :key_dim], value[:, :, :tokens, :value_dim])
        group_size, num_ahead = self.config.group_size, self.config.residual_length
        chunk = max(_QUANTIZE_CHUNK_TOKENS // group_size, 1) * group_size
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            size, group = part.stop - part.start, self.num_quantized // group_size
            held = slice(self.num_quantized, self.num_quantized + size)
            layout, tensors = self._arena.layout, self.tensors
            key_planes = self.quantizer.quantize_more_keys(
                key[:, :, part.start : part.stop + num_ahead],
                self.planes[0],
                None if real is None else real[:, : held.stop + num_ahead],
                num_ahead,
            )
            layout.put(tensors.key_planes, "key", group, key_planes)
            shown = None if real is None else real[:, held]
            value_planes = self.quantizer.quantize_value(value[:, :, part], shown)
            layout.put(tensors.value_planes, "value", group, value_planes)
            self.num_quantized += size
            self._moved()

    def requantize(self) -> None:
        """Make the codes anew by the padding that is known now, from the originals."""
        key, value = self.history()
        self.truncate(0)
        self.append(key, value)

    def history(
        self, kv_len: int | None = None, new: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerState`.

        Without a host tier the quantised tokens come back as their low-bit copies, which are all there is but for
        `sinks`.
        """
        parts = [self.window()] if new is None else [self.window(), new]
        tokens = self.num_quantized + sum(key.shape[2] for key, _ in parts)
        sides = self._empty(tokens)
        self._read_originals(0, self.num_quantized, sides)
        at = self.num_quantized
        for part in parts:
            for side, rows in zip(sides, part, strict=True):
                side.narrow(2, at, rows.shape[2]).copy_(rows)
            at += part[0].shape[2]
        key, value = sides
        return key[:, :, :kv_len], value[:, :, :kv_len]

    def _empty(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for keys and values of so many tokens."""
        key, value = (
            rows.new_empty((*rows.shape[:2], tokens, rows.shape[3])) for rows in self.tensors.window
        )
        return key, value

    def _read_originals(self, start: int, stop: int, into: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write the best pairs there are of quantised tokens `start` to `stop` to the first rows of `into`."""
        if start == stop:
            return
        to_key, to_value = (side.narrow(2, 0, stop - start) for side in into)
        key_planes, value_planes = self.planes
        shape, dtype, placement = self._arena.shape, self._arena.dtype, self.config.placement
        if self.host is not None:
            key_dim, value_dim = placement.host_dims(shape.key_dim, shape.value_dim)
            self.host.read(self.layer, start, stop, (to_key[..., :key_dim], to_value[..., :value_dim]))
            if placement.host_keys:
                return
        # Without a host tier: low-bit copies. With one for values alone: exact keys.
        key = self.quantizer.dequantize_key(key_planes, shape.key_dim, dtype)
        if self.host is None:
            value = self.quantizer.dequantize_value(value_planes, shape.value_dim, dtype)
            if self.sinks is not None:
                key, value = self.sinks.restore(key, value)
            to_value.copy_(value[:, :, start:stop])
        to_key.copy_(key[:, :, start:stop])

    def reorder(self, rows: torch.Tensor) -> None:
        """See `LayerState`."""
        if self.host is not None:
            self.host.reorder(self.layer, rows.cpu())
        super().reorder(rows)

    def truncate(self, kv_len: int) -> None:
        """Keep the first `kv_len` tokens (crop, or undoing a step that failed midway).

        Tokens that leave the low-bit copy return to the window at 16 bits, from the host.
        """
        if kv_len >= self.kv_len:
            return
        # Where tokens were held (`append`), fewer are quantised than the length says.
        keep = min(self.num_quantized_at(kv_len), self.num_quantized)
        window_key, window_value = self.window()
        if keep == self.num_quantized:
            self.window_len = kv_len - keep
            return
        stop = min(kv_len, self.num_quantized)
        sides = self._empty(kv_len - keep)
        self._read_originals(keep, stop, sides)
        for side, rows in zip(sides, (window_key, window_value), strict=True):
            side.narrow(2, stop - keep, kv_len - stop).copy_(rows[:, :, : kv_len - stop])
        self._make_room(keep, kv_len - keep)
        self._keep_quantized(keep)
        self._set_window(*sides)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """See `LayerState`; `sizes`: groups and window rows of the arena, tokens quantised and in the window."""
        layout = self._arena.layout
        sizes = layout.num_groups, layout.window_rows, self.num_quantized, self.window_len
        return {"sizes": torch.tensor(sizes, device="cpu"), **self._held()}

    def _held(self) -> dict[str, torch.Tensor]:
        sides = {
            f"{kind}_codes.{i}": p
            for kind, s in zip(_KINDS, self.planes, strict=True)
            for i, p in enumerate(s)
        }
        held = sides | {f"{kind}_window": rows for kind, rows in zip(_KINDS, self.window(), strict=True)}
        if self.sinks is not None:
            held |= {"sink_rows": self.sinks.rows, "sink_tokens": self.sinks.indices}
        return held

    def restore(self, held: Mapping[str, torch.Tensor]) -> None:
        """See `LayerState`."""
        num_groups, window_rows, self.num_quantized, self.window_len = held["sizes"].tolist()
        self._resize(num_groups, window_rows)
        restore_exactly(self._held(), held, f"layer {self.layer}")


def grown_tokens(tokens: int) -> int:
    """Tokens that memory for `tokens` is exchanged for when it is full.

    At most 256 tokens or a 64th lie unused. A growth copies all once in as many steps, each of which reads all.
    """
    return tokens + max(_LEAST_GROWTH_TOKENS, tokens // 64)


def grown_groups(groups: int, group_size: int) -> int:
    """Groups that codes grow to."""
    return max(groups + 1, grown_tokens(groups * group_size) // group_size)


def grown_rows(rows: int, config: SpecacheConfig, resident: bool) -> int:
    """Rows that a window's buffer of `rows` grows to when it is full; a resident layer's is all of its cache."""
    return grown_tokens(rows) if resident else config.residual_length + config.group_size


def reserved(config: SpecacheConfig, is_exact: bool) -> tuple[int, int]:
    """Groups and window rows that `SpecacheConfig.reserve` asks for."""
    if is_exact:
        # With `accept_guesses` the pair behind the newest one has a row too.
        return 0, (config.reserve + config.accept_guesses if config.reserve else 0)
    groups = config.num_quantized(config.reserve) // config.group_size
    return groups, grown_rows(0, config, resident=False) if config.reserve else 0
