"""Tables on the terminal, of records and of reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from specache_bench.records import Job, Record
from specache_fx.sizes import format_size


def table(columns: Mapping[str, str], rows: Sequence[Any], title: str = "", caption: str = "") -> Table:
    """A line a row; the first columns without figures to the left.

    Args:
        columns: By header, a value's name and its format: "median_ms:.1f", or "device_bytes:size".
        rows: Values by name.
        title: Above it.
        caption: Below it.
    """
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for header in columns:
        side: Any = "left" if header in ("", "task", "method") else "right"
        made.add_column(header, justify=side, no_wrap=header != "method", overflow="fold")
    for row in rows:
        made.add_row(*(_cell(row, column) for column in columns.values()))
    return made


def _cell(row: Mapping[str, Any], column: str) -> str:
    name, _, form = column.partition(":")
    value = row.get(name)
    if value is None or (form == "size" and not value):
        return "-"
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
    return table(columns, rows, title, caption)


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
    return table(columns, _beside(result["rows"], "sdpa float32", 1), title, caption)


def decode_tables(result: Mapping[str, Any]) -> list[Table]:
    """Decode steps of a model, from `DecodeSteps.run`: times, then bytes; ratios to transformers, or the first row."""
    size, rows = result["size"], _beside(result["rows"], "transformers", 2)
    times = {"": "name", "ms": "median_ms:.1f", "p10": "p10_ms:.1f", "p90": "p90_ms:.1f"}
    times |= {"tokens/s": "tokens_per_s:.1f", "ratio": "ratio", "floor\nms": "floor_ms:.1f"}
    times["compile\ns"] = "compile_s:.0f"
    sizes = {"": "name", "device\nKV": "device_bytes:size", "host\nKV": "host_bytes:size"}
    sizes |= {"moved\na step": "moved_bytes_per_step:size", "copies\nms": "copy_ms:.2f"}
    sizes |= {"hidden": "hidden_share:.0%", "calls": "operator_calls:.0f"}
    title = (
        f"decode steps at {result['kv_len']:,} tokens x batch {result['batch']}, {result['dtype']}:"
        f" {size['layers']} layers, hidden {size['hidden']}, {size['num_heads']} heads on {size['num_kv_heads']}"
    )
    floor = (
        f"floor: {format_size(result['weight_bytes'])} of weights and the device's part of the cache at"
        f" {result['bandwidth_gb_s']:.1f} GB/s, measured in this run by copying."
    )
    copies = (
        "copies: ms a step; hidden: the share of that which overlapped compute; calls: operators of PyTorch that a step"
        " calls."
    )
    return [table(times, rows, title, floor), table(sizes, rows, "", copies)]
