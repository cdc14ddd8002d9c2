"""Tables of speed in docs/performance.md and README.md, from results/: parts of `specache-bench page`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specache_bench.experiments.style import DASH, Table

Case = dict[str, dict[str, Any]]  # of each method its row

# Runs beside peers, and the name of their model.
RUNS = {
    "peers_float32": "4 layers, float32",
    "peers_bfloat16": "4 layers, bfloat16",
    "peers_batches": "4 layers, float32",
    "peers_smollm2": "SmolLM2's shape, bfloat16",
    "peers_1b": "1B, bfloat16",
}
_AVX2 = "4 layers, float32, AVX2"
_OURS = ("kivi 2-bit", "specache 2-bit")
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
_STARTS = {"uncompiled": "transformers, uncompiled", "torch.compile": "transformers, `torch.compile`"}


def results_of(results: Path, run: str) -> list[dict[str, Any]]:
    """The cases of a run, as `specache-bench decode` and `attention` wrote them."""
    found: list[dict[str, Any]] = json.loads((results / f"{run}.json").read_text())["results"]
    return found


def cases(results: Path, run: str) -> list[Case]:
    """The cases of a run: the rows of each, by method."""
    return [{row["name"]: row for row in result["rows"]} for result in results_of(results, run)]


def readme_tables(results: Path) -> dict[str, str]:
    """Of README: the shortest and the longest context of each model in bfloat16."""
    rows = []
    for run in ("peers_bfloat16", "peers_smollm2", "peers_1b"):
        first, *_, last = _times(results, run, RUNS[run], _METHODS)
        rows += [first, last]
    return {"peers": _table(("ms a step", *_METHODS), rows)}


def tables(results: Path) -> dict[str, str]:
    """Of docs/performance.md, by the names of their markers."""
    peers = [row for run, shape in RUNS.items() for row in _times(results, run, shape, _METHODS)]
    avx2 = _times(results, "peers_float32_avx2", _AVX2, _METHODS)
    widths = _times(results, "peers_kv_widths", _AVX2, _WIDTHS)
    return {
        "attention": _attention(results),
        "decode": _decode(results),
        "peers": _table(("ms a step", *_METHODS), peers),
        "avx2": _table(("ms a step", *_METHODS), avx2),
        "widths": _table(("ms a step", *_WIDTHS), widths),
        "starts": _starts(results),
        "bounds": _bounds(results),
    }


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table("", tuple(headers), tuple(map(tuple, rows))).markdown()


def _named(results: Path, run: str, shape: str) -> Iterator[tuple[str, Case]]:
    for result, rows in zip(results_of(results, run), cases(results, run), strict=True):
        batch = "" if result["batch"] == 1 else f", batch {result['batch']}"
        yield f"{shape}{batch}, {result['kv_len']:,} tokens", rows


def _times(results: Path, run: str, shape: str, methods: Sequence[str]) -> list[list[str]]:
    return [
        [name, *(f"{rows[method]['median_ms']:.1f}" for method in methods)]
        for name, rows in _named(results, run, shape)
    ]


def _attention(results: Path) -> str:
    (rows,) = cases(results, "bench_attention")
    lines = []
    for name, label in _ATTENTION.items():
        ms, queries = rows[name]["median_ms"], "2" if name.startswith("specache") else "1"
        ratios = [
            f"{rows[other]['median_ms'] / ms:.1f}x" for other in ("sdpa float32", "grouped matmul bfloat16")
        ]
        lines.append([label, queries, f"{ms:.1f}", *ratios, f"{rows[name]['floor_ms']:.1f}"])
    return _table(("", "queries a head", "ms", "of SDPA", "of the bf16 product", "floor, ms"), lines)


def _decode(results: Path) -> str:
    by_length = cases(results, "bench_decode")
    lengths, held = [result["kv_len"] for result in results_of(results, "bench_decode")], by_length[2]
    lines = [
        [
            name,
            *(f"{rows[name]['median_ms']:.1f}" for rows in by_length),
            f"{row['tokens_per_s']:.0f}",
            f"{row['device_bytes'] / 2**20:.1f} MiB",
            f"{row['copy_ms']:.2f}" if row["copy_ms"] else DASH,
        ]
        for name, row in held.items()
    ]
    behind = (f"tokens/s at {lengths[2]:,}", "device KV there", "copies, ms a step")
    return _table(("", *(f"{length:,}" for length in lengths), *behind), lines)


def _starts(results: Path) -> str:
    rows = {
        (row["method"], row["start"]): row["first_call"]
        for row in json.loads((results / "real_first_call.json").read_text())["rows"]
        if row["model"] == "smollm2"
    }
    lines = []
    for method in ("uncompiled", "torch.compile", "specache"):
        starts = ("uncompiled",) * 2 if method == "uncompiled" else ("empty caches", "second process")
        seconds = [rows[method, start][token] for start in starts for token in ("first_token", "fifth_token")]
        lines.append([_STARTS.get(method, method), *(f"{each:.{int(each < 1)}f}" for each in seconds)])
    return _table(
        ("seconds", "empty caches, first token", "fifth", "second process, first token", "fifth"), lines
    )


def _bounds(results: Path) -> str:
    lines = []
    for run, shape in RUNS.items():
        for name, rows in _named(results, run, shape):
            ours, kivi = (rows[method] for method in reversed(_OURS))
            parts = ours["parts_ms"]
            times = (ours["median_ms"], ours["floor_ms"], parts["decode step"], parts["attention"])
            if "batch" not in name:
                lines.append([name, *(f"{ms:.1f}" for ms in (*times, kivi["parts_ms"]["attention"]))])
    return _table(("", "step", "floor", "its graph", "of that attention", "KIVI's attention"), lines)
