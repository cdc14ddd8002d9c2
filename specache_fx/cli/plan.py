"""The memory plan: the bytes of a KV cache, before there is one; and plans side by side, for people.

Each part comes from the class that will allocate it, with sizes alone: `Layout` for a layer's arena, `Staging` for its
slots (on the meta device), `HostCache` for its blocks. A test compares plans with sessions.

Paper: SpeCache §4.1 and Table 1, column "KV Cache Size".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table

from specache_fx.cli.sizes import format_size
from specache_fx.config import SpecacheConfig
from specache_fx.runtime.host.host_cache import ALIGN_TOKENS
from specache_fx.runtime.layers.layer_cache import grown_groups, reserved
from specache_fx.runtime.layers.layer_cache import grown_rows as grown_layer_rows
from specache_fx.runtime.layers.layout import LayerShape, Layout
from specache_fx.runtime.layers.window_cache import grown_rows
from specache_fx.runtime.quant import make_quantizer
from specache_fx.runtime.transfer import Staging

_EXTRAS = ("resident_layers", "sink_tokens")  # not worth a word where they are 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one KV cache takes, or one layer of it, all batch rows together.

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


@dataclass(frozen=True)
class Prompt:
    """What is planned for.

    Attributes:
        shapes: Of each layer; windows stay exact on the device.
        context: Tokens of a sequence.
        batch: Sequences.
        dtype: Name of the model's dtype.
    """

    shapes: Sequence[LayerShape]
    context: int
    batch: int = 1
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        parts = []
        for (heads, key_dim, value_dim, window), layers in Counter(self.shapes).items():
            width = key_dim if key_dim == value_dim else f"({key_dim} + {value_dim})"
            kept = "" if window is None else f" in a window of {window:,} tokens"
            parts.append(f"{layers} layers x {heads} kv heads x {width}{kept}")
        return f"{', '.join(parts)}, {self.context:,} tokens x batch {self.batch}, {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        """All of it, like layers counted."""
        shapes = [{"layers": layers, **shape._asdict()} for shape, layers in Counter(self.shapes).items()]
        return {**vars(self), "shapes": shapes}


def plan(prompt: Prompt, config: SpecacheConfig, device: str = "cuda") -> MemoryPlan:
    """Plan the bytes of a prompt's cache.

    Args:
        prompt: Its sizes.
        config: The options.
        device: Where the model runs, "cuda" or "cpu": `lookahead="auto"` goes by it.
    """
    config = config.for_device(device)
    resident = config.resident_layers
    layers = []
    for shape in prompt.shapes:
        layers.append(_layer(shape, prompt, config, is_resident=shape.window is None and resident > 0))
        resident -= shape.window is None
    device_bytes, peak, host, full = map(sum, zip(*(vars(layer).values() for layer in layers), strict=True))
    return MemoryPlan(device_bytes, peak, host, full)


def _layer(shape: LayerShape, prompt: Prompt, config: SpecacheConfig, is_resident: bool) -> MemoryPlan:
    """The plan of one layer."""
    context, batch, dtype = prompt.context, prompt.batch, getattr(torch, prompt.dtype)
    quantizer = make_quantizer(config)

    def arena(num_groups: int, window_rows: int, sink_tokens: int = 0) -> int:
        return Layout(quantizer, shape, batch, dtype, num_groups, window_rows, sink_tokens).nbytes

    rows, heads = shape.tokens(context), batch * shape.num_kv_heads
    full = rows * heads * (shape.key_dim + shape.value_dim) * dtype.itemsize
    if shape.window is not None:
        return MemoryPlan(arena(0, rows), arena(0, grown_rows(rows, shape.window - 1)), 0, full)
    grows = context >= config.reserve
    if is_resident:
        rows = max(rows, reserved(config, is_exact=True)[1])
        grown = grown_layer_rows(rows, config, resident=True) if grows else rows
        return MemoryPlan(arena(0, rows), arena(0, grown), 0, full)
    num_quantized = config.num_quantized(context)
    least_groups, least_rows = reserved(config, is_exact=False)
    groups = max(num_quantized // config.group_size, least_groups)
    groups_peak = grown_groups(groups, config.group_size) if grows else groups
    now = arena(groups, max(context - num_quantized, least_rows), config.sink_tokens)
    peak = arena(groups_peak, grown_layer_rows(0, config, resident=False), config.sink_tokens)
    host_dim = sum(config.placement.host_dims(shape.key_dim, shape.value_dim))
    on_host = max(num_quantized, config.num_quantized(config.reserve)) if config.placement.offload else 0
    host_tokens = -(-on_host // ALIGN_TOKENS) * ALIGN_TOKENS
    slots = Staging.empty((1, 1, config.top_k), host_dim, dtype, torch.device("meta"))
    staged = heads * slots.nbytes if config.stages else 0
    return MemoryPlan(now + staged, peak + staged, heads * host_tokens * host_dim * dtype.itemsize, full)


def plan_rows(
    prompt: Prompt, options: Mapping[str, Any], widths: Sequence[int] | None, budget: int | None = None
) -> list[dict[str, Any]]:
    """A plan for each bit width.

    Args:
        prompt: What for.
        options: Of `SpecacheConfig`, without `bits`.
        widths: The values of `bits`; None for all that the policy has.
        budget: Device bytes that the cache of a batch may take while decoding; None for no budget. Weights and
            activations are taken off before.

    Returns:
        A dict each: `bits`, `ratio`, the fields of `MemoryPlan`, and for a budget `largest_batch` and
        `largest_full_batch` (of the full cache): the most sequences that fit, 0 if not even one does.

    Raises:
        ConfigError: If an option is not valid.
    """
    rows = []
    if widths is None:
        widths = sorted(SpecacheConfig.from_options(options).placement.bits, reverse=True)
    for bits in widths:
        config = SpecacheConfig.from_options({**options, "bits": bits})
        made = plan(prompt, config)
        row: dict[str, Any] = {"bits": bits, "ratio": made.ratio, **vars(made)}
        if budget is not None:
            # A batch takes no more than so many sequences, each with an arena of its own.
            one = plan(replace(prompt, batch=1), config)
            row["largest_batch"] = budget // one.device_bytes_peak
            row["largest_full_batch"] = budget // one.full_bytes
        rows.append(row)
    return rows


def plan_table(
    prompt: Prompt, options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], budget: int | None = None
) -> Table:
    """The table of `plan_rows`, below the full cache of the model itself."""
    table = Table(
        "bits",
        title=str(prompt),
        caption=", ".join(
            f"{name} {value}" for name, value in options.items() if value or name not in _EXTRAS
        ),
    )
    for header in ("device", "ratio", "host", "device, decoding"):
        table.add_column(header, justify="right")
    if budget is not None:
        table.add_column(f"batch in {format_size(budget)}", justify="right")
    full = format_size(rows[0]["full_bytes"])
    table.add_row("full cache", full, "1.00x", "-", full, *_batch(rows[0].get("largest_full_batch")))
    for row in rows:
        host = format_size(row["host_bytes"]) if row["host_bytes"] else "-"
        sizes = format_size(row["device_bytes"]), format_size(row["device_bytes_peak"])
        ratio, largest = f"{row['ratio']:.2f}x", _batch(row.get("largest_batch"))
        table.add_row(str(row["bits"]), sizes[0], ratio, host, sizes[1], *largest)
    return table


def _batch(largest: int | None) -> list[str]:
    return [] if largest is None else [f"{largest:,}"]
