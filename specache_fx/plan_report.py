"""Memory plans of several bit widths side by side: numbers, and a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specache_fx.config import SpecacheConfig
from specache_fx.plan import largest_batch, plan
from specache_fx.sizes import DTYPE_BYTES, format_size

_EXTRAS = ("resident_layers", "sink_tokens")  # not worth a word where they are 0


def plan_rows(
    settings: Mapping[str, Any], options: Mapping[str, Any], widths: Sequence[int] | None
) -> list[dict[str, Any]]:
    """A plan for each bit width.

    Args:
        settings: `layers`, `num_kv_heads`, `head_dim`, `context`, `batch`, `dtype` (a name) and `budget_bytes` (or
            None); also `window_layers` and `window` where layers keep one, and `value_dim` where it is not `head_dim`.
        options: Of `SpecacheConfig`, without `bits`.
        widths: The values of `bits`; None for all that the policy has.

    Returns:
        A dict each: `bits`, `ratio`, the fields of `MemoryPlan`, and for a budget `largest_batch` and
        `largest_full_batch` (of the full cache).

    Raises:
        ConfigError: If a setting or an option is not valid.
    """
    names = ("layers", "num_kv_heads", "head_dim", "context", "window_layers", "window", "value_dim")
    shape = {name: settings[name] for name in names if name in settings}
    rows = []
    if widths is None:
        widths = sorted(SpecacheConfig.from_options(options).placement.bits, reverse=True)
    for bits in widths:
        config = SpecacheConfig.from_options({**options, "bits": bits})
        sizes: dict[str, Any] = {**shape, "config": config, "dtype_bytes": DTYPE_BYTES[settings["dtype"]]}
        made = plan(batch=settings["batch"], **sizes)
        row: dict[str, Any] = {"bits": bits, "ratio": made.ratio, **vars(made)}
        if (budget := settings["budget_bytes"]) is not None:
            row["largest_batch"] = largest_batch(budget, **sizes)
            row["largest_full_batch"] = budget // (made.full_bytes // settings["batch"])
        rows.append(row)
    return rows


def _width(settings: Mapping[str, Any]) -> str:
    value_dim = settings.get("value_dim")
    return f"{settings['head_dim']}" if value_dim is None else f"({settings['head_dim']} + {value_dim})"


def _windows(settings: Mapping[str, Any]) -> str:
    if not settings.get("window_layers"):
        return ""
    return f"; {settings['window_layers']} layers keep a window of {settings['window']:,} tokens"


def plan_table(
    settings: Mapping[str, Any], options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> Table:
    """The table of `plan_rows`, below the full cache of the model itself."""
    table = Table(
        title="{layers} layers x {num_kv_heads} kv heads x {width}, {context:,} tokens x batch {batch}, {dtype}".format(
            width=_width(settings), **settings
        )
        + _windows(settings),
        caption=", ".join(
            f"{name} {value}" for name, value in options.items() if value or name not in _EXTRAS
        ),
    )
    budget = settings["budget_bytes"]
    headers = ["device", "ratio", "host", "device, decoding"]
    if budget is not None:
        headers.append(f"batch in {format_size(budget)}")
    table.add_column("bits", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right")
    full = format_size(rows[0]["full_bytes"])
    lines = [["full cache", full, "1.00x", "-", full]]
    for row in rows:
        host = format_size(row["host_bytes"]) if row["host_bytes"] else "-"
        sizes = [
            format_size(row["device_bytes"]),
            f"{row['ratio']:.2f}x",
            host,
            format_size(row["device_bytes_peak"]),
        ]
        lines.append([str(row["bits"]), *sizes])
    if budget is not None:
        batches = [rows[0]["largest_full_batch"], *(row["largest_batch"] for row in rows)]
        for line, largest in zip(lines, batches, strict=True):
            line.append(f"{largest:,}")
    for line in lines:
        table.add_row(*line)
    return table
