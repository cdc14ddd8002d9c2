"""Memory plans of several bit widths side by side: numbers, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from specache_fx.config import SpecacheConfig
from specache_fx.model_shape import ModelShape
from specache_fx.plan import largest_batch, plan
from specache_fx.sizes import format_size

_EXTRAS = ("resident_layers", "sink_tokens")  # not worth a word where they are 0


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
        no_windows = () if self.shape.window_layers else ("window_layers", "window")
        shape = asdict(self.shape)
        return {
            name: size for name, size in shape.items() if size is not None and name not in no_windows
        } | own


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
