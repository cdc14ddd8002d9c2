"""The memory plan: the bytes of a KV cache, before there is one.

Each part comes from the class that will allocate it, with sizes alone: `Layout` for a layer's arena, `Staging` for its
slots (on the meta device), `HostCache` for its blocks. A test compares plans with sessions.

Paper: SpeCache §4.1 and Table 1, column "KV Cache Size".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.runtime.host_cache import ALIGN_TOKENS
from specache_fx.runtime.layer_cache import grown_groups, reserved
from specache_fx.runtime.layer_cache import grown_rows as grown_layer_rows
from specache_fx.runtime.layout import LayerShape, Layout
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.transfer import Staging
from specache_fx.runtime.window_cache import grown_rows

_DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes: the plan depends on nothing else of a dtype


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one KV cache takes, all layers and batch rows together.

    Attributes:
        device_bytes: On the device right after prefill: codes with their scales, the 16-bit window and sinks, the
            staging slots with their indices. Not a padding mask (`batch * context` bytes where a prompt is padded).
        device_bytes_peak: On the device once decoding has quantised a group (`group_size` tokens at most after
            prefill): the window's buffer has grown to `residual_length + group_size` rows, and the codes, like a
            resident layer, have room for 256 more tokens, or a 64th more. A layer that keeps a window has an eighth
            more rows (64 at least, while it fills). Holds until that is full; with `reserve`, while there are no more
            tokens. The memory of a step itself is not in it: activations, and a layer's old codes while they move to a
            larger buffer.
        host_bytes: Reserved on the host right after prefill.
        full_bytes: The whole cache on the device in the model's dtype.
    """

    device_bytes: int
    device_bytes_peak: int
    host_bytes: int
    full_bytes: int

    @property
    def ratio(self) -> float:
        """`device_bytes / full_bytes`: the paper's "KV Cache Size"."""
        return self.device_bytes / self.full_bytes


def plan(
    layers: int,
    num_kv_heads: int,
    head_dim: int,
    context: int,
    batch: int,
    config: SpecacheConfig,
    value_dim: int | None = None,
    dtype_bytes: int = 2,
    window_layers: int = 0,
    window: int | None = None,
    device: str = "cuda",
) -> MemoryPlan:
    """Plan the bytes of a prompt's cache.

    Args:
        layers: Attention layers, all alike but for `window_layers` and the config's `resident_layers`; of those that
            share KV the ones that store it.
        num_kv_heads: Key/value heads of a layer.
        head_dim: Channels of a key.
        context: Tokens of the prompt.
        batch: Sequences.
        config: The options.
        value_dim: Channels of a value; `head_dim` by default.
        dtype_bytes: Bytes of one element of the KV dtype: 2 (bfloat16, float16) or 4 (float32).
        window_layers: How many of the layers keep a window of the newest tokens: exact, on the device.
        window: Tokens that a query of theirs reaches, its own included.
        device: Where the model runs, "cuda" or "cpu": `lookahead="auto"` goes by it.

    Raises:
        ConfigError: If a size is not a whole number of at least 1, or the dtype is of another width.
    """
    value_dim = head_dim if value_dim is None else value_dim
    config = config.for_device(device)
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "context": context, "batch": batch}
    _check_sizes({"layers": layers, **sizes, "value_dim": value_dim}, dtype_bytes)
    _check_window(layers, window_layers, window)
    quantizer, kv_dtype = make_quantizer(config), _DTYPES[dtype_bytes]
    shape = LayerShape(num_kv_heads, head_dim, value_dim)

    def arena(num_groups: int, window_rows: int, sink_tokens: int = 0) -> int:
        return Layout(quantizer, shape, batch, kv_dtype, num_groups, window_rows, sink_tokens).nbytes

    num_quantized = config.num_quantized(context)
    least_groups, least_rows = reserved(config, is_exact=False)
    num_groups, window_rows = max(num_quantized // config.group_size, least_groups), context - num_quantized
    host_dim = sum(config.placement.host_dims(head_dim, value_dim))
    on_host = max(num_quantized, config.num_quantized(config.reserve)) if config.placement.offload else 0
    host_tokens = -(-on_host // ALIGN_TOKENS) * ALIGN_TOKENS
    staged = batch * num_kv_heads * _staging_bytes(config, host_dim, kv_dtype)
    resident = min(config.resident_layers, layers - window_layers)
    tiered = layers - window_layers - resident
    rows = min(context, window - 1) if window is not None else 0
    rows_peak = grown_rows(rows, window - 1) if window is not None else 0
    now = arena(num_groups, max(window_rows, least_rows), config.sink_tokens)
    grows = context >= config.reserve
    groups_peak = grown_groups(num_groups, config.group_size) if grows else num_groups
    peak = arena(groups_peak, grown_layer_rows(0, config, resident=False), config.sink_tokens)
    whole = max(context, reserved(config, is_exact=True)[1])
    whole_peak = grown_layer_rows(whole, config, resident=True) if grows else whole
    all_here, all_here_peak = arena(0, whole), arena(0, whole_peak)
    pairs = batch * num_kv_heads * (head_dim + value_dim) * dtype_bytes
    return MemoryPlan(
        device_bytes=tiered * (now + staged) + resident * all_here + window_layers * arena(0, rows),
        device_bytes_peak=tiered * (peak + staged)
        + resident * all_here_peak
        + window_layers * arena(0, rows_peak),
        host_bytes=tiered * batch * num_kv_heads * host_tokens * host_dim * dtype_bytes,
        full_bytes=(tiered + resident) * pairs * context + window_layers * pairs * rows,
    )


def _check_window(layers: int, window_layers: int, window: int | None) -> None:
    if not 0 <= window_layers <= layers or (window_layers and (window is None or window < 2)):
        raise ConfigError(
            f"window_layers={window_layers!r} with window={window!r} is not valid: give a window of at least 2 tokens"
            f" for at most all of the {layers} layers."
        )


def _check_sizes(sizes: Mapping[str, int], dtype_bytes: int) -> None:
    if dtype_bytes not in _DTYPES:
        widths = ", ".join(map(str, _DTYPES))
        raise ConfigError(f"dtype_bytes={dtype_bytes!r} is not valid: choose one of {widths}.")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name}={size!r} is not valid: give a whole number >= 1.")


def largest_batch(
    budget_bytes: int,
    layers: int,
    num_kv_heads: int,
    head_dim: int,
    context: int,
    config: SpecacheConfig,
    value_dim: int | None = None,
    dtype_bytes: int = 2,
    window_layers: int = 0,
    window: int | None = None,
    device: str = "cuda",
) -> int:
    """The most sequences whose cache stays within a budget of device bytes while decoding; 0 if not even one does.

    Counts `MemoryPlan.device_bytes_peak`, the cache alone: take weights and activations off the budget before.

    Args:
        budget_bytes: Device bytes for the KV cache.
        layers: As `plan`, like the rest.
        num_kv_heads: See `plan`.
        head_dim: See `plan`.
        context: See `plan`.
        config: See `plan`.
        value_dim: See `plan`.
        dtype_bytes: See `plan`.
        window_layers: See `plan`.
        window: See `plan`.
        device: See `plan`.
    """
    sizes = layers, num_kv_heads, head_dim, context, 1, config, value_dim, dtype_bytes
    one = plan(*sizes, window_layers, window, device)
    # A batch takes no more than so many sequences, each with an arena of its own.
    return max(budget_bytes, 0) // one.device_bytes_peak


def _staging_bytes(config: SpecacheConfig, row_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the staging slots of one batch row and kv head."""
    if not config.stages:
        return 0
    return Staging.empty((1, 1, config.top_k), row_dim, dtype, torch.device("meta")).nbytes
