"""Tables on the terminal, of records and of reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from specache_bench.records import Job, Record
from specache_fx.sizes import format_size

Column = tuple[str, Callable[[Any], str]]
"""A header and the text of a row's cell."""


def table(columns: Sequence[Column], rows: Sequence[Any], title: str = "", caption: str = "") -> Table:
    """A line a row; the first columns without figures to the left."""
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for header, _ in columns:
        text = header in ("", "task", "method")
        made.add_column(
            header, justify="left" if text else "right", no_wrap=header != "method", overflow="fold"
        )
    for row in rows:
        made.add_row(*(text(row) for _, text in columns))
    return made


def of(name: str, form: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], str]:
    """A cell's text: a dash where there is no such value."""
    return lambda row: "-" if row.get(name) is None else form(row[name])


def records_table(title: str, records: Mapping[Job, Record]) -> Table:
    """One line a job: its measure, bytes and rates."""
    first = next(iter(records.values())).result
    measures: dict[str, tuple[str, str]] = {
        "score": ("score", "{:.3f}"),
        "perplexity": ("\nPPL", "{:.3f}"),
        "kl": ("KL\nto full", "{:.4f}"),
        "same_top": ("top-1\n= full", "{:.2f}"),
    }
    rates = {
        "exact_hit_rate": "token\nhits",
        "topk_hit_rate": "top-k\nhits",
        "attention_hit_rate": "att.\nhits",
    }
    rows = []
    for job, record in records.items():
        options = {name: value for name, value in job.method.options if name != "lowering"}
        method = " ".join([job.method.name, *(f"{name}={value}" for name, value in options.items())])
        rows.append(
            {"task": str(job.workload), "method": method, **record.result, **record.result.get("stats", {})}
        )
    columns: list[Column] = [("task", of("task", str)), ("method", of("method", str))]
    columns += [(head, of(name, form.format)) for name, (head, form) in measures.items() if name in first]
    columns += [("device\nKV", of("device_bytes", format_size)), ("\nratio", of("ratio", "{:.2f}x".format))]
    columns.append(("host\nKV", lambda row: format_size(row["host_bytes"]) if row.get("host_bytes") else "-"))
    columns += [(head, of(name, "{:.2f}".format)) for name, head in rates.items()]
    columns.append(("ms a\nstep", of("decode_ms", "{:.1f}".format)))
    caption = (
        "bytes of one sequence at the end of generation; ratio: KV bytes on the device to the full cache's. token hits:"
        " the speculative token was the next one. top-k hits: the pairs wanted had been prefetched; attention hits: of"
        " the attention on them."
    )
    return table(columns, rows, title, caption)


def attention_table(result: Mapping[str, Any]) -> Table:
    """One layer's attention, from `Attention.run`; ratios to PyTorch's in float32."""
    shape = result["shape"]
    reference = next(row["median_ms"] for row in result["rows"] if row["name"] == "sdpa float32")
    columns: list[Column] = [("", of("name", str))]
    names = ("median_ms", "p10_ms", "p90_ms")
    columns += [
        (head, of(name, "{:.2f}".format)) for head, name in zip(("ms", "p10", "p90"), names, strict=True)
    ]
    columns += [
        ("ratio", of("median_ms", lambda ms: f"{reference / ms:.1f}x")),
        ("reads", of("bytes", format_size)),
    ]
    columns.append(("floor ms", of("floor_ms", "{:.2f}".format)))
    title = (
        f"one layer's decode attention: {shape['kv_len']:,} tokens x batch {shape['batch']},"
        f" {shape['num_heads']} heads on {shape['num_kv_heads']} kv heads of {shape['head_dim']}"
    )
    caption = (
        f"specache: {result['lanes']} queries a head, {result['dtype']}, kernel {result['kernel']}; the others 1 query."
        f" floor: its bytes at {result['bandwidth_gb_s']:.1f} GB/s, measured in this run by copying."
    )
    return table(columns, result["rows"], title, caption)


def decode_tables(result: Mapping[str, Any]) -> list[Table]:
    """Decode steps of a model, from `DecodeSteps.run`: times, then bytes; ratios to transformers, or the first row."""
    size, rows = result["size"], result["rows"]
    reference = next(
        (row["median_ms"] for row in rows if row["name"] == "transformers"), rows[0]["median_ms"]
    )
    name: Column = ("", of("name", str))
    heads = {"ms": "median_ms", "p10": "p10_ms", "p90": "p90_ms", "tokens/s": "tokens_per_s"}
    times: list[Column] = [name, *((head, of(value, "{:.1f}".format)) for head, value in heads.items())]
    times.append(("ratio", of("median_ms", lambda ms: f"{reference / ms:.2f}x")))
    times += [
        ("floor\nms", of("floor_ms", "{:.1f}".format)),
        ("compile\ns", of("compile_s", "{:.0f}".format)),
    ]
    heads = {"device\nKV": "device_bytes", "host\nKV": "host_bytes", "moved\na step": "moved_bytes_per_step"}
    sizes: list[Column] = [
        name,
        *((head, of(value, lambda n: format_size(n) if n else "-")) for head, value in heads.items()),
    ]
    sizes += [("copies\nms", of("copy_ms", "{:.2f}".format)), ("hidden", of("hidden_share", "{:.0%}".format))]
    sizes.append(("calls", of("operator_calls", "{:.0f}".format)))
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
