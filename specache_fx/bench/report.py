"""What `specache-fx bench` prints, writes and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from specache_fx.errors import ConfigError
from specache_fx.sizes import format_size

_COLOURS = {"specache": "#0072B2", "kivi": "#56B4E9", "kcache": "#009E73"}
_OTHERS = "#999999"


def attention_table(result: Mapping[str, Any], base: str) -> Table:
    """One layer's attention: a line each, fastest last.

    Args:
        result: From `bench_attention`.
        base: Name of the row that the others are compared with.
    """
    shape = result["shape"]
    table = Table(
        title=f"one layer's decode attention: {shape['kv_len']:,} tokens x batch {shape['batch']},"
        f" {shape['num_heads']} heads on {shape['num_kv_heads']} kv heads of {shape['head_dim']}",
        caption=f"specache: {result['lanes']} queries a head, {result['dtype']}, kernel {result['kernel']}; the others"
        f" 1 query. floor: its bytes at {result['bandwidth_gb_s']:.1f} GB/s, measured in this run by copying.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for header in ("ms", "p10", "p90", "ratio", "reads", "floor ms"):
        table.add_column(header, justify="right", no_wrap=True)
    reference = next(row["median_ms"] for row in result["rows"] if row["name"] == base)
    for row in result["rows"]:
        table.add_row(
            row["name"],
            *(f"{row[name]:.2f}" for name in ("median_ms", "p10_ms", "p90_ms")),
            f"{reference / row['median_ms']:.1f}x",
            format_size(row["bytes"]),
            f"{row['floor_ms']:.2f}",
        )
    return table


def decode_tables(result: Mapping[str, Any], base: str) -> list[Table]:
    """Decode steps of a model, a line each method: times, then bytes; see `bench_decode`."""
    size, reference = result["size"], next(row["median_ms"] for row in result["rows"] if row["name"] == base)
    times = Table(
        title=f"decode steps at {result['kv_len']:,} tokens x batch {result['batch']}, {result['dtype']}:"
        f" {size['layers']} layers, hidden {size['hidden']}, {size['num_heads']} heads on {size['num_kv_heads']}",
        caption=f"floor: {format_size(result['weight_bytes'])} of weights and the device's part of the cache at"
        f" {result['bandwidth_gb_s']:.1f} GB/s, measured in this run by copying.",
    )
    sizes = Table(
        caption="copies: ms a step; hidden: the share of that which overlapped compute;"
        " calls: operators of PyTorch that a step calls."
    )
    headers = {
        # In lines of their own: cells then fit into 80 columns.
        times: ("ms", "p10", "p90", "tokens/s", "ratio", "floor\nms", "compile\ns"),
        sizes: ("device\nKV", "host\nKV", "moved\na step", "copies\nms", "hidden", "calls"),
    }
    for table, names in headers.items():
        table.box, table.collapse_padding, table.pad_edge = box.SIMPLE_HEAD, True, False
        table.add_column("", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        times.add_row(
            row["name"],
            *(f"{row[name]:.1f}" for name in ("median_ms", "p10_ms", "p90_ms", "tokens_per_s")),
            f"{reference / row['median_ms']:.2f}x",
            f"{row['floor_ms']:.1f}",
            f"{row['compile_s']:.0f}",
        )
        sizes.add_row(
            row["name"],
            *(
                format_size(row[name]) if row[name] else "-"
                for name in ("device_bytes", "host_bytes", "moved_bytes_per_step")
            ),
            "-" if row["copy_ms"] is None else f"{row['copy_ms']:.2f}",
            "-" if row["hidden_share"] is None else f"{row['hidden_share']:.0%}",
            "-" if row["operator_calls"] is None else f"{row['operator_calls']:.0f}",
        )
    return [times, sizes]


def check_plot(path: Path | None) -> None:
    """Say at once what `--png` needs.

    Raises:
        ConfigError: If matplotlib is missing, or there is no such folder.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png" or not path.absolute().parent.is_dir():
        raise ConfigError(f"--png {path}: give a file whose name ends in .png, in a folder that exists.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: pip install 'specache-fx[eval]', or leave it out."
        ) from error


def plot_bars(path: Path, results: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> None:
    """Milliseconds of every row, median with p10 and p90, and the floor; a panel for each result."""
    from matplotlib.figure import Figure

    rows_of = [result["rows"] for result in results]
    figure = Figure(figsize=(8, 1 + 0.34 * sum(len(rows) + 2 for rows in rows_of)), layout="constrained")
    panels = figure.subplots(
        len(results), 1, squeeze=False, gridspec_kw={"height_ratios": [len(rows) + 2 for rows in rows_of]}
    )[:, 0]
    for panel, rows, title in zip(panels, rows_of, titles, strict=True):
        names = [row["name"] for row in rows]
        medians = [row["median_ms"] for row in rows]
        spread = [
            [row["median_ms"] - row["p10_ms"] for row in rows],
            [row["p90_ms"] - row["median_ms"] for row in rows],
        ]
        colours = [_COLOURS.get(name.split()[0], _OTHERS) for name in names]
        panel.barh(names, medians, xerr=spread, color=colours, error_kw={"ecolor": "#444444", "capsize": 2})
        floors = [row["floor_ms"] for row in rows]
        panel.scatter(
            floors, names, marker="|", s=180, color="black", label="floor: bytes at the memory's bandwidth"
        )
        for name, value, high in zip(names, medians, spread[1], strict=True):
            panel.annotate(
                f"{value:.1f}", (value + high, name), (4, 0), textcoords="offset points", va="center"
            )
        panel.invert_yaxis()
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xlim(0, 1.12 * max(row["p90_ms"] for row in rows))
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms (bars: median, lines: p10 to p90)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower right", fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=140)
