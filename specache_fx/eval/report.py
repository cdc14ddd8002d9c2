"""Rows of results, a table for people, and what goes into JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from specache_fx.eval.bench import Method
from specache_fx.eval.outcome import ContinuationOutcome, Measured, Outcome, TextOutcome
from specache_fx.sizes import format_size

Row = dict[str, Any]
RATES = ("exact_hit_rate", "topk_hit_rate", "attention_hit_rate")


def make_row(method: Method, outcome: Measured, *, task: str, length: int, depth: float | None = None) -> Row:
    """One result as plain data; what is not known is None. Bytes are of one sequence."""
    row: Row = {
        "task": task,
        "length": length,
        "depth": depth,
        "method": method.name,
        "options": dict(method.options),
        "device_bytes": outcome.device_bytes,
        "full_bytes": outcome.full_bytes,
        "ratio": outcome.ratio,
        "host_bytes": outcome.host_bytes,
        "decode_ms": None if math.isnan(outcome.decode_ms) else outcome.decode_ms,
        "seconds": outcome.seconds,
        **{name: outcome.stats.get(name) for name in RATES},
        "stats": outcome.stats,
    }
    if isinstance(outcome, Outcome):
        by_turn = [_mean(turn) for turn in zip(*outcome.turn_scores, strict=True)]
        return row | {
            **({"score_by_turn": by_turn} if by_turn else {}),
            "score": outcome.score,
            "scores": list(outcome.scores),
            "predictions": list(outcome.predictions),
        }
    if isinstance(outcome, ContinuationOutcome):
        return row | {
            "agreement": _mean(outcome.agreement),
            "until_difference": _mean(outcome.until_difference),
            "full_loss": _mean(outcome.losses),
            "agreements": list(outcome.agreement),
            "until_differences": list(outcome.until_difference),
            "full_losses": list(outcome.losses),
            "ids": [list(row) for row in outcome.ids],
        }
    assert isinstance(outcome, TextOutcome)
    return row | {
        "perplexity": outcome.perplexity,
        "kl": outcome.kl,
        "same_top": outcome.same_top,
        "losses": list(outcome.losses),
        "tokens": outcome.tokens,
        "loss_at": outcome.loss_at,
        "kl_at": outcome.kl_at,
        "same_top_at": outcome.same_top_at,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# What is measured: name in a row, header, format.
_MEASURES = {
    "score": (("score", "score", "{:.3f}"),),
    "perplexity": (
        ("perplexity", "\nPPL", "{:.3f}"),
        ("kl", "KL\nto full", "{:.4f}"),
        ("same_top", "top-1\n= full", "{:.2f}"),
    ),
    "agreement": (
        ("agreement", "tokens\n= full", "{:.2f}"),
        ("until_difference", "share before\n1st diff.", "{:.2f}"),
        ("full_loss", "nats\nunder full", "{:.3f}"),
    ),
}


def results_table(title: str, rows: Sequence[Row]) -> Table:
    """One line a result."""
    depths = any(row["depth"] is not None for row in rows)
    measures = next(columns for name, columns in _MEASURES.items() if name in rows[0])
    table = Table(
        title=title,
        caption="bytes of one sequence at the end of generation; ratio: KV bytes on the device to the full cache's."
        " token hits: the speculative token was the next one. top-k hits: the pairs wanted had been prefetched;"
        " attention hits: of the attention on them.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("task", overflow="fold")
    for header in ("length", *(("depth",) if depths else ())):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("method", overflow="fold")
    held = ("device\nKV", "\nratio", "host\nKV", "token\nhits", "top-k\nhits", "att.\nhits", "ms a\nstep")
    for header in (*(header for _, header, _ in measures), *held):
        table.add_column(header, justify="right", no_wrap=True)
    rate = "{:.2f}".format
    for row in rows:
        options = {name: value for name, value in row["options"].items() if name != "lowering"}
        table.add_row(
            row["task"],
            f"{row['length']:,}",
            *([_or_dash(rate, row["depth"])] if depths else []),
            " ".join([row["method"], *(f"{name}={value}" for name, value in options.items())]),
            *(_or_dash(form.format, row[name]) for name, _, form in measures),
            format_size(row["device_bytes"]),
            f"{row['ratio']:.2f}x",
            _or_dash(format_size, row["host_bytes"] or None),
            *(_or_dash(rate, row[name]) for name in RATES),
            _or_dash("{:.1f}".format, row["decode_ms"]),
        )
    return table


def _or_dash(write: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else write(value)
