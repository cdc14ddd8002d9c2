"""Tables: of rows by columns, in Markdown for pages and by rich on the terminal; those of records and of reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich import box

from specache_bench.records import Job, Record
from specache_fx.cli.sizes import format_size

DASH = "-"


@dataclass(frozen=True)
class Table:
    """A table as text: `headers`, and rows of as many strings. `title` stands above it, `caption` below."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @classmethod
    def of(
        cls, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], title: str = "", caption: str = ""
    ) -> Table:
        """A line a row.

        Args:
            columns: By header, a value's place and its format: "median_ms:.1f", "device_bytes:size",
                "stats/topk_hit_rate:.2f".
            rows: Values by name.
            title: See the class.
            caption: See the class.
        """
        lines = (tuple(_cell(row, column) for column in columns.values()) for row in rows)
        return cls(title, tuple(columns), tuple(lines), caption)

    def markdown(self) -> str:
        """GitHub's Markdown; first column to the left, figures to the right."""
        rule = ["---"] + ["---:"] * (len(self.headers) - 1)
        lines = [self.headers, rule, *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def __rich__(self) -> rich.table.Table:
        """The first columns without figures to the left."""
        look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
        made = rich.table.Table(title=self.title, caption=self.caption, **look)
        for header in self.headers:
            side: Any = "left" if header in ("", "task", "method") else "right"
            made.add_column(header, justify=side, no_wrap=header != "method", overflow="fold")
        for row in self.rows:
            made.add_row(*row)
        return made


def _cell(row: Mapping[str, Any], column: str) -> str:
    place, _, form = column.partition(":")
    value: Any = row
    for name in place.split("/"):
        value = None if value is None else value.get(name)
    if value is None or (form == "size" and not value):
        return DASH
    return format_size(value) if form == "size" else f"{value:{form}}"


def records_table(title: str, records: Mapping[Job, Record]) -> Table:
    """One line a job: its measure, bytes and rates."""
    first = next(iter(records.values())).result
    measures = {"score": "score:.3f", "\nPPL": "perplexity:.3f", "KL\nto full": "kl:.4f"}
    measures["top-1\n= full"] = "same_top:.2f"
    rows = []
    for job, record in records.items():
        named = {name: value for name, value in job.method.options if name != "lowering"}
        method = " ".join([job.method.name, *(f"{name}={value}" for name, value in named.items())])
        stats = record.result.get("stats", {})
        ratio = f"{record.ratio:.2f}x"
        rows.append({"task": str(job.workload), "method": method, **record.result, **stats, "ratio": ratio})
    columns = {"task": "task", "method": "method"}
    columns |= {head: what for head, what in measures.items() if what.partition(":")[0] in first}
    columns |= {"device\nKV": "device_bytes:size", "\nratio": "ratio", "host\nKV": "host_bytes:size"}
    columns |= {"token\nhits": "exact_hit_rate:.2f", "top-k\nhits": "topk_hit_rate:.2f"}
    columns |= {"att.\nhits": "attention_hit_rate:.2f", "ms a\nstep": "decode_ms:.1f"}
    caption = (
        "bytes of one sequence at the end of generation; ratio: KV bytes on the device to the full cache's. token hits:"
        " the speculative token was the next one. top-k hits: the pairs wanted had been prefetched; attention hits: of"
        " the attention on them."
    )
    return Table.of(columns, rows, title, caption)


def _beside(rows: Sequence[Mapping[str, Any]], reference: str, digits: int) -> list[dict[str, Any]]:
    """Rows with how many times less than a reference they take; than the first where it is not there."""
    times = {row["name"]: row["median_ms"] for row in rows}
    whole = times.get(reference, rows[0]["median_ms"])
    return [{**row, "ratio": f"{whole / row['median_ms']:.{digits}f}x"} for row in rows]


def attention_table(result: Mapping[str, Any]) -> Table:
    """One layer's attention, from `Attention.run`; ratios to PyTorch's in float32."""
    shape = result["shape"]
    columns = {"": "name", "ms": "median_ms:.2f", "p10": "p10_ms:.2f", "p90": "p90_ms:.2f"}
    columns |= {"ratio": "ratio", "reads": "bytes:size", "floor ms": "floor_ms:.2f"}
    title = (
        f"one layer's decode attention: {shape['kv_len']:,} tokens x batch {shape['batch']},"
        f" {shape['num_heads']} heads on {shape['num_kv_heads']} kv heads of {shape['head_dim']}"
    )
    caption = (
        f"specache: {result['lanes']} queries a head, {result['dtype']}, kernel {result['kernel']}; the others 1 query."
        f" floor: its bytes at {result['bandwidth_gb_s']:.1f} GB/s, measured in this run by copying."
    )
    return Table.of(columns, _beside(result["rows"], "sdpa float32", 1), title, caption)


def decode_tables(result: Mapping[str, Any]) -> list[Table]:
    """Decode steps of a model, from `DecodeSteps.run`: times, then bytes; ratios to transformers, or the first row."""
    size, rows = result["size"], _beside(result["rows"], "transformers", 2)
    times = {"": "name", "ms": "median_ms:.1f", "p10": "p10_ms:.1f", "p90": "p90_ms:.1f"}
    times |= {"tokens/s": "tokens_per_s:.1f", "ratio": "ratio", "floor\nms": "floor_ms:.1f"}
    times["compile\ns"] = "compile_s:.0f"
    sizes = {"": "name", "device\nKV": "device_bytes:size", "host\nKV": "host_bytes:size"}
    sizes |= {"moved\na step": "moved_bytes_per_step:size", "copies\nms": "copy_ms:.2f"}
    sizes["hidden"] = "hidden_share:.0%"
    title = (
        f"decode steps at {result['kv_len']:,} tokens x batch {result['batch']}, {result['dtype']}:"
        f" {size['layers']} layers, hidden {size['hidden']}, {size['num_heads']} heads on {size['num_kv_heads']}"
    )
    floor = (
        f"floor: {format_size(result['weight_bytes'])} of weights and the device's part of the cache at"
        f" {result['bandwidth_gb_s']:.1f} GB/s, measured in this run by copying."
    )
    copies = "copies: ms a step; hidden: the share of that which overlapped compute."
    tables = [Table.of(times, rows, title, floor), Table.of(sizes, rows, "", copies)]
    return [*tables, busy_table([("", result)])] if rows[0].get("busy") else tables


def busy_table(cases: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Steps beside busy processes: of each case, by name, and each method, the median and the slowest tenth."""
    counts = list(cases[0][1]["rows"][0]["busy"])
    lines = []
    for name, result in cases:
        for row in result["rows"]:
            timings = [row, *(row["busy"][count] for count in counts)]
            times = (f"{one['median_ms']:.1f} ({one['p90_ms']:.1f})" for one in timings)
            lines.append((" ".join(filter(None, [name, row["name"]])), *times))
    headers = ("ms a step: median (p90)", "idle", *(f"beside {count}" for count in counts))
    return Table("", headers, tuple(lines), "beside so many other processes that compute all the time.")
