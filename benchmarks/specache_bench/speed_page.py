"""Tables of speed in docs/performance.md and README.md, from results/: parts of `specache-bench page`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specache_bench.report import Table, busy_table

Case = dict[str, dict[str, Any]]  # of each method its row

# Runs beside peers, and the name of their model.
RUNS = {
    "peers_float32": "4 layers, float32",
    "peers_bfloat16": "4 layers, bfloat16",
    "peers_batches": "4 layers, float32",
    "peers_smollm2": "SmolLM2's shape, bfloat16",
    "peers_1b": "1B, bfloat16",
}
_BUSY = {
    "busy": "4 layers, float32, 4,096 tokens",
    "busy_smollm2": "SmolLM2's shape, bfloat16, 4,096 tokens",
}
_OURS = ("kivi 2-bit", "specache 2-bit", "specache 2-bit, token")
_METHODS = ("transformers", "transformers, compiled", "OpenVINO, u8 KV", "llama.cpp, f16 KV", *_OURS)
_WIDTHS = ("OpenVINO, u8 KV", "OpenVINO, u4 KV", "llama.cpp, f16 KV", "llama.cpp, q8_0 KV", *_OURS)
_ATTENTION = {
    "sdpa float32": "`F.scaled_dot_product_attention`, float32",
    "sdpa bfloat16": "the same, bfloat16",
    "grouped matmul bfloat16": "grouped products and softmax, bfloat16",
    "specache 2-bit": "SpeCache, 2 bits",
    "specache 1-bit": "SpeCache, 1 bit",
    "specache 2-bit, kivi": 'SpeCache, 2 bits, `quantizer="kivi"`',
    "specache 1-bit, kivi": 'SpeCache, 1 bit, `quantizer="kivi"`',
}
_BOUNDS = {
    "": "name",
    "step": "specache 2-bit/median_ms:.1f",
    "floor": "specache 2-bit/floor_ms:.1f",
    "its graph": "specache 2-bit/parts_ms/decode step:.1f",
    "of that attention": "specache 2-bit/parts_ms/attention:.2f",
    "KIVI's attention": "kivi 2-bit/parts_ms/attention:.2f",
}


# Columns of the table of pauses: way and start.
_PAUSES = {
    "uncompiled": ("uncompiled", "uncompiled"),
    "`torch.compile`": ("torch.compile", "later process"),
    "specache, traced prompts": ("specache, traced prompts", "later process"),
    "specache": ("specache", "later process"),
    '`warm="background"`': ("specache, in the background", "later process"),
    "specache, empty caches": ("specache", "empty caches"),
    "after `warm_up()`": ("specache, warmed up", "later process"),
}


_READS = {"uncompiled": "uncompiled", "auto": "specache", "traced": "specache, traced prompts"}


def results_of(results: Path, run: str) -> list[dict[str, Any]]:
    """The cases of a run, as `specache-bench decode` and `attention` wrote them."""
    found: list[dict[str, Any]] = json.loads((results / f"{run}.json").read_text())["results"]
    return found


def cases(results: Path, run: str) -> list[Case]:
    """The cases of a run: the rows of each, by method."""
    return [{row["name"]: row for row in result["rows"]} for result in results_of(results, run)]


def _named(results: Path, run: str, shape: str) -> list[dict[str, Any]]:
    """The cases of a run, each with its name."""
    found = []
    for result, rows in zip(results_of(results, run), cases(results, run), strict=True):
        batch = "" if result["batch"] == 1 else f", batch {result['batch']}"
        found.append({"name": f"{shape}{batch}, {result['kv_len']:,} tokens", **rows})
    return found


def readme_tables(results: Path) -> dict[str, str]:
    """Of README: the shortest and the longest context of each model in bfloat16."""
    rows = []
    for run in ("peers_bfloat16", "peers_smollm2", "peers_1b"):
        first, *_, last = _named(results, run, RUNS[run])
        rows += [first, last]
    return {
        "peers": _times(rows, _METHODS),
        "chat": _chat(results, ("uncompiled", "`torch.compile`", "specache")),
    }


def tables(results: Path) -> dict[str, str]:
    """Of docs/performance.md, by the names of their markers; that of prompts once they were run."""
    peers = [case for run, shape in RUNS.items() for case in _named(results, run, shape)]
    prompts = {"prompts": _prompts(results)} if (results / "prompts.json").exists() else {}
    return prompts | {
        "attention": _attention(cases(results, "bench_attention")[0]),
        "decode": _decode(results_of(results, "bench_decode")),
        "peers": _times(peers, _METHODS),
        "widths": _times(_named(results, "peers_kv_widths", RUNS["peers_float32"]), _WIDTHS),
        "busy": busy_table(_busy(results)).markdown(),
        "chat": _chat(results, _PAUSES),
        "bounds": Table.of(_BOUNDS, (case for case in peers if "batch" not in case["name"])).markdown(),
    }


def _times(rows: Sequence[Case], methods: Sequence[str]) -> str:
    columns = {"ms a step": "name"} | {method: f"{method}/median_ms:.1f" for method in methods}
    return Table.of(columns, rows).markdown()


def _busy(results: Path) -> list[tuple[str, dict[str, Any]]]:
    """Cases by their names, with the methods whose steps beside busy processes are shown."""
    found = []
    for run, name in _BUSY.items():
        (result,) = results_of(results, run)
        rows = [row for row in result["rows"] if row["name"] in ("transformers", *_OURS)]
        found.append((f"{name}:", {**result, "rows": rows}))
    return found


def _attention(case: Case) -> str:
    columns = {"": "label", "queries a head": "queries", "ms": "median_ms:.1f", "of SDPA": "sdpa float32"}
    columns |= {"of the bf16 product": "grouped matmul bfloat16", "floor, ms": "floor_ms:.1f"}
    lines = []
    for name, label in _ATTENTION.items():
        row, named = case[name], {"label": label, "queries": 1 + name.startswith("specache")}
        others = ("sdpa float32", "grouped matmul bfloat16")
        ratios = {other: f"{case[other]['median_ms'] / row['median_ms']:.1f}x" for other in others}
        lines.append(row | named | ratios)
    return Table.of(columns, lines).markdown()


def _decode(results: Sequence[dict[str, Any]]) -> str:
    lengths = [result["kv_len"] for result in results]
    columns = {"": "name"} | {f"{length:,}": f"{length}:.1f" for length in lengths}
    columns |= {f"tokens/s at {lengths[2]:,}": "tokens_per_s:.0f", "device KV there": "device_bytes:size"}
    columns["copies, ms a step"] = "copy_ms:.2f"
    rows = [{**row, "copy_ms": row["copy_ms"] or None} for row in results[2]["rows"]]
    for length, result in zip(lengths, results, strict=True):
        for row, other in zip(rows, result["rows"], strict=True):
            row[str(length)] = other["median_ms"]
    return Table.of(columns, rows).markdown()


def _chat(results: Path, ways: Iterable[str]) -> str:
    """A line a call: the pauses of some of `_PAUSES`, and the CPU seconds of the whole chat."""
    lines: dict[str, dict[str, str]] = {}
    kinds = {_PAUSES[way]: way for way in ways}
    totals = dict.fromkeys(kinds.values(), 0.0)
    for row in json.loads((results / "chat.json").read_text())["rows"]:
        way = kinds.get((row["method"], row["start"]))
        if way is None:
            continue
        totals[way] += row["cpu_seconds"]
        if "first_token" in row:  # else it is the warm-up
            first, wait = (_seconds(row[name]) for name in ("first_token", "longest_wait"))
            lines.setdefault(row["call"], {"call": row["call"]})[way] = f"{first}, {wait}"
    told = {"call": "CPU seconds of all"} | {way: f"{total:.0f}" for way, total in totals.items()}
    columns = {"first token, longest wait (s)": "call"} | {way: way for way in totals}
    return Table.of(columns, [*lines.values(), told]).markdown()


def _prompts(results: Path) -> str:
    """A line a way: seconds, and MiB of peak memory beyond what was held before."""
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads((results / "prompts.json").read_text())["rows"]:
        rows.setdefault(row["method"], {"name": _READS[row["method"]]})[row["call"]] = row
    calls = [name for name in next(iter(rows.values())) if name != "name"]
    columns = {"": "name"} | {f"{call}, s": f"{call}/seconds:.2f" for call in calls}
    columns |= {f"{call}, peak MiB": f"{call}/peak_mib:.0f" for call in calls}
    return Table.of(columns, rows.values()).markdown()


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"
