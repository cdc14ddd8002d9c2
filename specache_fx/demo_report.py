"""The demo's report: its rows, a table for people, and JSON with the provenance of the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from specache_fx.provenance import provenance
from specache_fx.session_stats import SessionStats
from specache_fx.sizes import format_size


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo; see `specache-fx demo --help`."""

    model: str
    prompts: int = 100
    context: int = 2000
    records: int = 48
    seed: int = 0
    batch_size: int = 10
    dtype: str = "bfloat16"
    lowering: str = "inductor"


@dataclass(frozen=True)
class BatchResult:
    """The result of one `generate` call; bytes of the whole batch.

    Attributes:
        prompts: How many.
        correct: Of how many every answer token is right.
        device_bytes: Of the KV cache at the end.
        stats: Of the KV cache; None for transformers' own.
    """

    prompts: int
    correct: int
    device_bytes: int
    stats: SessionStats | None


@dataclass(frozen=True)
class DemoRow:
    """One line of the table. Bytes are of one sequence; None where the method has no such thing.

    Attributes:
        method: A name in `METHODS`.
        exact_match: Share of prompts of which every answer token is right.
        device_bytes: Of the KV cache at the end, counted on its tensors.
        ratio: `device_bytes` to the full cache of the same length: the paper's "KV Cache Size".
        host_bytes: Reserved on the host.
        exact_hit_rate: Share of speculative tokens that were the next token.
        topk_hit_rate: Share of the pairs wanted that had been prefetched.
        prefetched_bytes_per_step: Brought to the device for each decoded token.
        seconds: For all prompts, compiling included.
        options: Given to `model.compile`; empty for the full cache.
    """

    method: str
    exact_match: float
    device_bytes: float
    ratio: float
    host_bytes: float | None
    exact_hit_rate: float | None
    topk_hit_rate: float | None
    prefetched_bytes_per_step: float | None
    seconds: float
    options: dict[str, Any]

    @classmethod
    def of(
        cls, method: str, options: dict[str, Any], results: Sequence[BatchResult], seconds: float
    ) -> DemoRow:
        """Sum batches up; every prompt weighs the same."""
        prompts = sum(result.prompts for result in results)
        device_bytes = sum(result.device_bytes for result in results)
        found = [result.stats for result in results if result.stats is not None]
        offloads = any(stats.host_bytes for stats in found)
        steps = [(stats.prefetched_bytes / stats.steps) for stats in found]

        def mean(rates: Sequence[float | None]) -> float | None:
            known = [
                (rate, result.prompts)
                for rate, result in zip(rates, results, strict=True)
                if rate is not None
            ]
            return sum(rate * weight for rate, weight in known) / sum(w for _, w in known) if known else None

        return cls(
            method=method,
            exact_match=sum(result.correct for result in results) / prompts,
            device_bytes=device_bytes / prompts,
            ratio=device_bytes / sum(stats.full_bytes for stats in found) if found else 1.0,
            host_bytes=sum(stats.host_bytes for stats in found) / prompts if offloads else None,
            exact_hit_rate=mean([stats.exact_hit_rate for stats in found]) if found else None,
            topk_hit_rate=mean([stats.topk_hit_rate for stats in found]) if found else None,
            prefetched_bytes_per_step=sum(steps) / prompts if offloads else None,
            seconds=seconds,
            options=options,
        )


def demo_table(settings: DemoSettings, rows: list[DemoRow]) -> Table:
    """One line a method, bytes for one sequence."""
    table = Table(
        title=f"{settings.prompts} prompts of {settings.context:,} tokens with {settings.records} records each;"
        " bytes for one sequence",
        caption="ratio: KV bytes on the device to the full cache's. token hits: the speculative token was the next"
        " one. top-k hits: the KV pairs wanted had been prefetched.",
        box=box.SIMPLE_HEAD,  # fits into 80 columns, like the headers in two lines
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("method", no_wrap=True)
    for header in ("exact\nmatch", "device\nKV", "\nratio", "host\nKV", "token\nhits", "top-k\nhits"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("fetched\na step", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method,
            f"{row.exact_match:.2f}",
            format_size(row.device_bytes),
            f"{row.ratio:.2f}x",
            _or_dash(format_size, row.host_bytes),
            _or_dash("{:.2f}".format, row.exact_hit_rate),
            _or_dash("{:.2f}".format, row.topk_hit_rate),
            _or_dash(format_size, row.prefetched_bytes_per_step),
        )
    return table


def _or_dash(write: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else write(value)


def demo_json(settings: DemoSettings, rows: list[DemoRow], threads: int | None = None) -> dict[str, Any]:
    """The report: rows, settings, machine and versions.

    Args:
        settings: Of the run.
        rows: Its results.
        threads: CPU threads it ran with; torch's choice by default.
    """
    made = provenance(torch.device("cpu"))
    if threads is not None:
        made["device"]["threads"] = threads
    return {
        **made,
        "settings": asdict(settings) | {"model": os.path.relpath(settings.model)},
        "rows": [asdict(row) for row in rows],
    }
