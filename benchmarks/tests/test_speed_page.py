"""Sentences on speed have the figures of the committed results; `test_experiments.py` compares the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specache_bench.speed_page import cases, readme_tables, results_of, tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PERFORMANCE = ROOT / "results", ROOT / "docs" / "performance.md"


def _growth() -> Iterator[str]:
    lengths = [result["kv_len"] for result in results_of(RESULTS, "bench_decode")]
    assert lengths == [256, 4096, 16384, 32768]
    runs = cases(RESULTS, "bench_decode")
    *_, long, longest = runs
    for name in ("specache 2-bit", "specache 1-bit"):
        # A step grows no faster than what it reads of the context, and the copies of two lanes are little of it.
        growth = longest[name]["median_ms"] / long[name]["median_ms"]
        assert growth < longest[name]["device_bytes"] / long[name]["device_bytes"]
        two_lanes = [case[f"{name}, token"] for case in runs]
        assert all(row["copy_ms"] < 0.05 * row["median_ms"] for row in two_lanes)
    here, there = (case["specache 2-bit"]["median_ms"] for case in (long, longest))
    yield f"a step takes {there / here:.1f} times"
    yield f"is {long['transformers']['median_ms'] / here:.1f} times as fast as one of transformers."


def _int8_weights() -> Iterator[str]:
    short, long = ({name: row["median_ms"] for name, row in case.items()} for case in cases(RESULTS, "int8"))
    ours, plain, compiled = "specache 2-bit", "transformers", "transformers, compiled"
    yield f"take {short[ours]:.1f} ms at 4,096 tokens and {long[ours]:.1f} at 16,384, in float32"
    yield f"transformers takes {short[plain]:.0f} and {long[plain]:.0f}, "
    yield f"under `torch.compile` {short[compiled]:.0f} and {long[compiled]:.0f}."


def _longer_contexts() -> Iterator[str]:
    names = ("specache 2-bit", "kivi 2-bit", "transformers")
    ours, kivi, plain = ([case[name] for case in cases(RESULTS, "slope")] for name in names)

    def listed(rows: list[dict[str, Any]], digits: int) -> str:
        *first, last = (f"{row['median_ms']:.{digits}f}" for row in rows)
        return f"{', '.join(first)} and {last}"

    yield f"SpeCache takes {listed(ours, 1)} ms at 4,096, 32,768 and 131,072 tokens"
    yield f"One of KIVI takes {listed(kivi, 1)}, one of transformers {listed(plain, 0)} (4 layers, float32)."
    growth = [(rows[-1]["median_ms"] - rows[0]["median_ms"]) / (131.072 - 4.096) for rows in (ours, kivi)]
    yield f"{growth[0]:.2f} and {growth[1]:.2f} ms for 1,000 tokens, {growth[0] / growth[1]:.1f} times as much."
    (mine, all_mine), (theirs, all_theirs) = (
        (rows[-1]["parts_ms"]["attention"], rows[-1]["parts_ms"]["decode step"]) for rows in (ours, kivi)
    )
    yield f"{mine:.1f} of {all_mine:.1f} ms of the graph at 131,072 tokens, KIVI's {theirs:.1f} of {all_theirs:.1f}."
    yield f"Reading weights and codes takes {ours[-1]['floor_ms']:.1f} ms there."


@pytest.mark.parametrize("sentences", [_growth, _int8_weights, _longer_contexts])
def test_times_in_sentences_are_those_of_the_committed_runs(sentences: Callable[[], Iterator[str]]) -> None:
    text = " ".join(PERFORMANCE.read_text().split())
    for sentence in sentences():
        assert sentence in text


def _behind(table: str) -> list[str]:
    """The lines of a table in which a peer is ahead of SpeCache."""
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    ours, peers = header.index("specache 2-bit"), [i for i, name in enumerate(header) if name.endswith("KV")]
    return [row[0] for row in rows if min(float(row[peer]) for peer in peers) < float(row[ours])]


def test_documents_say_where_a_peer_is_ahead() -> None:
    assert _behind(readme_tables(RESULTS)["peers"]) == _behind(tables(RESULTS)["peers"]) == []
    text = " ".join(PERFORMANCE.read_text().split())
    assert "No line has a peer that is faster than SpeCache." in text
