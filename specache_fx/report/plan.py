"""The memory plan: the bytes of a KV cache, before there is one; and plans side by side, for people.

Each part comes from the class that will allocate it, with sizes alone: `Layout` for a layer's arena, `Staging` for its
slots (on the meta device), `HostCache` for its blocks. A test compares plans with sessions.

Paper: SpeCache §4.1 and Table 1, column "KV Cache Size".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from specache_fx.config import SpecacheConfig
from specache_fx.errors import ConfigError
from specache_fx.report.model_shape import ModelShape
from specache_fx.runtime.host_cache import ALIGN_TOKENS
from specache_fx.runtime.layer_cache import grown_groups, reserved
from specache_fx.runtime.layer_cache import grown_rows as grown_layer_rows
from specache_fx.runtime.layout import LayerShape, Layout
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.transfer import Staging
from specache_fx.runtime.window_cache import grown_rows
from specache_fx.sizes import DTYPE_BYTES, format_size

_EXTRAS = ("resident_layers", "sink_tokens")  # not worth a word where they are 0


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
    shape: ModelShape, context: int, batch: int, config: SpecacheConfig, device: str = "cuda"
) -> MemoryPlan:
    """Plan the bytes of a prompt's cache.

    Args:
        shape: The model's layers. All are the same but for its windows, which stay exact on the device, and the
            config's `resident_layers`.
        context: Tokens of the prompt.
        batch: Sequences.
        config: The options.
        device: Where the model runs, "cuda" or "cpu": `lookahead="auto"` goes by it.

    Raises:
        ConfigError: If a size is not a whole number of at least 1, or the dtype is unknown.
    """
    _check_sizes(shape, context, batch)
    config = config.for_device(device)
    layers, num_kv_heads, window = shape.layers, shape.num_kv_heads, shape.window
    key_dim, value_dim = shape.head_dim, shape.value_dim or shape.head_dim
    quantizer, kv_dtype = make_quantizer(config), getattr(torch, shape.dtype)

    def arena(num_groups: int, window_rows: int, sink_tokens: int = 0) -> int:
        of_layer = LayerShape(num_kv_heads, key_dim, value_dim)
        return Layout(quantizer, of_layer, batch, kv_dtype, num_groups, window_rows, sink_tokens).nbytes

    num_quantized = config.num_quantized(context)
    least_groups, least_rows = reserved(config, is_exact=False)
    num_groups, window_rows = max(num_quantized // config.group_size, least_groups), context - num_quantized
    host_dim = sum(config.placement.host_dims(key_dim, value_dim))
    on_host = max(num_quantized, config.num_quantized(config.reserve)) if config.placement.offload else 0
    host_tokens = -(-on_host // ALIGN_TOKENS) * ALIGN_TOKENS
    staged = batch * num_kv_heads * _staging_bytes(config, host_dim, kv_dtype)
    resident = min(config.resident_layers, layers - shape.window_layers)
    tiered = layers - shape.window_layers - resident
    rows = min(context, window - 1) if window is not None else 0
    rows_peak = grown_rows(rows, window - 1) if window is not None else 0
    grows = context >= config.reserve
    groups_peak = grown_groups(num_groups, config.group_size) if grows else num_groups
    now = arena(num_groups, max(window_rows, least_rows), config.sink_tokens)
    peak = arena(groups_peak, grown_layer_rows(0, config, resident=False), config.sink_tokens)
    whole = max(context, reserved(config, is_exact=True)[1])
    whole_peak = grown_layer_rows(whole, config, resident=True) if grows else whole

    def on_device(of_tiered: int, whole_rows: int, window_rows: int) -> int:
        return (
            tiered * (of_tiered + staged)
            + resident * arena(0, whole_rows)
            + shape.window_layers * arena(0, window_rows)
        )

    pairs = batch * num_kv_heads * (key_dim + value_dim) * kv_dtype.itemsize
    return MemoryPlan(
        device_bytes=on_device(now, whole, rows),
        device_bytes_peak=on_device(peak, whole_peak, rows_peak),
        host_bytes=tiered * batch * num_kv_heads * host_tokens * host_dim * kv_dtype.itemsize,
        full_bytes=(tiered + resident) * pairs * context + shape.window_layers * pairs * rows,
    )


def _check_sizes(shape: ModelShape, context: int, batch: int) -> None:
    if shape.dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={shape.dtype!r} is not valid: choose one of {', '.join(DTYPE_BYTES)}.")
    names = ("layers", "num_kv_heads", "head_dim") + ("value_dim",) * (shape.value_dim is not None)
    sizes = {name: getattr(shape, name) for name in names} | {"context": context, "batch": batch}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name}={size!r} is not valid: give a whole number >= 1.")
    has_window = shape.window is not None and shape.window > 1
    if not 0 <= shape.window_layers <= shape.layers or (shape.window_layers and not has_window):
        raise ConfigError(
            f"window_layers={shape.window_layers!r} with window={shape.window!r} is not valid: give a window of at"
            f" least 2 tokens for at most all of the {shape.layers} layers."
        )


def largest_batch(
    budget_bytes: int, shape: ModelShape, context: int, config: SpecacheConfig, device: str = "cuda"
) -> int:
    """The most sequences whose cache stays within a budget of device bytes while decoding; 0 if not even one does.

    Counts `MemoryPlan.device_bytes_peak`, the cache alone: take weights and activations off the budget before.

    Args:
        budget_bytes: Device bytes for the KV cache.
        shape: As `plan`, like the rest.
        context: See `plan`.
        config: See `plan`.
        device: See `plan`.
    """
    one = plan(shape, context, 1, config, device)
    # A batch takes no more than so many sequences, each with an arena of its own.
    return max(budget_bytes, 0) // one.device_bytes_peak


def _staging_bytes(config: SpecacheConfig, row_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the staging slots of one batch row and kv head."""
    if not config.stages:
        return 0
    return Staging.empty((1, 1, config.top_k), row_dim, dtype, torch.device("meta")).nbytes


@dataclass(frozen=True)
class PlanSettings:
    """What is planned for.

    Attributes:
        shape: The model's.
        context: Tokens of a sequence.
        batch: Sequences.
        budget_bytes: Device bytes that a batch may take; None for no budget.
    """

    shape: ModelShape
    context: int
    batch: int
    budget_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """All of it that is there."""
        own = {"context": self.context, "batch": self.batch, "budget_bytes": self.budget_bytes}
        return {name: size for name, size in asdict(self.shape).items() if size is not None} | own


def plan_rows(
    settings: PlanSettings, options: Mapping[str, Any], widths: Sequence[int] | None
) -> list[dict[str, Any]]:
    """A plan for each bit width.

    Args:
        settings: What for.
        options: Of `SpecacheConfig`, without `bits`.
        widths: The values of `bits`; None for all that the policy has.

    Returns:
        A dict each: `bits`, `ratio`, the fields of `MemoryPlan`, and for a budget `largest_batch` and
        `largest_full_batch` (of the full cache).

    Raises:
        ConfigError: If a setting or an option is not valid.
    """
    shape, context, batch, budget = settings.shape, settings.context, settings.batch, settings.budget_bytes
    rows = []
    if widths is None:
        widths = sorted(SpecacheConfig.from_options(options).placement.bits, reverse=True)
    for bits in widths:
        config = SpecacheConfig.from_options({**options, "bits": bits})
        made = plan(shape, context, batch, config)
        row: dict[str, Any] = {"bits": bits, "ratio": made.ratio, **vars(made)}
        if budget is not None:
            row["largest_batch"] = largest_batch(budget, shape, context, config)
            row["largest_full_batch"] = budget // (made.full_bytes // batch)
        rows.append(row)
    return rows


def plan_table(
    settings: PlanSettings, options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> Table:
    """The table of `plan_rows`, below the full cache of the model itself."""
    shape, budget = settings.shape, settings.budget_bytes
    width = shape.head_dim if shape.value_dim is None else f"({shape.head_dim} + {shape.value_dim})"
    windows = (
        f"; {shape.window_layers} layers keep a window of {shape.window:,} tokens" if shape.window else ""
    )
    table = Table(
        "bits",
        title=f"{shape.layers} layers x {shape.num_kv_heads} kv heads x {width}, {settings.context:,} tokens"
        f" x batch {settings.batch}, {shape.dtype}{windows}",
        caption=", ".join(
            f"{name} {value}" for name, value in options.items() if value or name not in _EXTRAS
        ),
    )
    for header in ("device", "ratio", "host", "device, decoding"):
        table.add_column(header, justify="right")
    full = format_size(rows[0]["full_bytes"])
    lines = [["full cache", full, "1.00x", "-", full]]
    for row in rows:
        host = format_size(row["host_bytes"]) if row["host_bytes"] else "-"
        sizes = format_size(row["device_bytes"]), format_size(row["device_bytes_peak"])
        lines.append([str(row["bits"]), sizes[0], f"{row['ratio']:.2f}x", host, sizes[1]])
    if budget is not None:
        table.add_column(f"batch in {format_size(budget)}", justify="right")
        batches = [rows[0]["largest_full_batch"], *(row["largest_batch"] for row in rows)]
        for line, largest in zip(lines, batches, strict=True):
            line.append(f"{largest:,}")
    for line in lines:
        table.add_row(*line)
    return table
