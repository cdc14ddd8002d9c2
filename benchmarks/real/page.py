"""The tables of docs/real_models.md, and README's, from results/real_*.json: `python -m benchmarks.real.page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.real.runs import CODES, GUESSES, LENGTHS, MAIN_LENGTH, MIXED, TASK_LENGTH, TASKS
from specache_fx.experiments.base import Table
from specache_fx.experiments.page import renew

MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
PAGE, README, RESULTS = Path("docs/real_models.md"), Path("README.md"), Path("results")
DEFAULT = "recover (default)"
Rows = list[dict[str, Any]]


def blocks(results: Path) -> dict[str, str]:
    """The page's tables by their names."""
    rows = {model: json.loads((results / f"real_{model}.json").read_text())["rows"] for model in MODELS}
    candidates = json.loads((results / "real_candidates.json").read_text())["rows"]
    tables = {
        "lengths": _lengths(rows),
        "misses": _misses(rows),
        "codes": _codes(rows),
        "free": _free(rows),
        "tasks": _tasks(rows),
        "candidates": _candidates(candidates),
        "accepted": _accepted(json.loads((results / "real_accepted.json").read_text())["models"]),
    }
    return {name: table.markdown() for name, table in tables.items()}


def readme_block(results: Path) -> dict[str, str]:
    """README's table: both models at one length."""
    lines = []
    for model, title in MODELS.items():
        rows = json.loads((results / f"real_{model}.json").read_text())["rows"]
        for name, label, bits in (
            ("full cache", "full cache", None),
            ("KIVI 2-bit", "KIVI", 2),
            ("SpeCache of the paper, 2-bit", "paper", 2),
            ("SpeCache 2-bit", DEFAULT, 2),
            ("SpeCache 1-bit", DEFAULT, 1),
        ):
            row = find(rows, label, bits, "forced", MAIN_LENGTH)
            figures = (
                _number(row, *of) for of in (("kl", 3), ("same_top", 2), ("perplexity", 1), ("ratio", 2))
            )
            lines.append((title, name, *figures))
    headers = ("model", "method", "KL to full", "top-1 = full", "perplexity", "device KV ratio")
    return {"real": Table("", headers, tuple(lines)).markdown()}


def _lengths(rows: dict[str, Rows]) -> Table:
    """KL to the full cache by tokens."""
    lengths = sorted({length for of_model in LENGTHS.values() for length in of_model})
    lines = []
    for model, title in MODELS.items():
        for label, bits in [
            ("full cache", None),
            *((n, b) for b in (2, 1) for n in ("KIVI", "paper", *GUESSES)),
        ]:
            found = {n: find(rows[model], label, bits, "forced", n) for n in lengths}
            main = found[MAIN_LENGTH]
            if main is None:
                continue
            kls = tuple(_number(row, "kl", 4) for row in found.values())
            head = (title, "16" if bits is None else str(bits), label)
            lines.append((*head, *kls, _number(main, "perplexity", 2), _number(main, "ratio", 2)))
    headers = (
        "model",
        "bits",
        "",
        *(f"{n:,}" for n in lengths),
        f"perplexity at {MAIN_LENGTH:,}",
        "device KV",
    )
    return Table("", headers, tuple(lines))


def _misses(rows: dict[str, Rows]) -> Table:
    lines = []
    for model, title in MODELS.items():
        for bits in (2, 1):
            for label in ("paper", *GUESSES):
                row = find(rows[model], label, bits, "forced", MAIN_LENGTH)
                if row is None:
                    continue
                stats = ("exact_hit_rate", "topk_hit_rate", "attention_hit_rate")
                figures = (_number(row, name, 2 if name != "attention_hit_rate" else 3) for name in stats)
                same = _number(row, "same_top", 2)
                lines.append((title, str(bits), label, _number(row, "kl", 4), same, *figures))
    headers = ("model", "bits", "", "KL", "top-1 = full", "token right", "top-k hits", "attention captured")
    return Table("", headers, tuple(lines))


def _codes(rows: dict[str, Rows]) -> Table:
    lines = []
    for bits in (2, 1):
        for label in (DEFAULT, *CODES, *(MIXED if bits == 2 else ())):
            found = [find(rows[model], label, bits, "forced", MAIN_LENGTH) for model in MODELS]
            name = "turboquant" if label == DEFAULT else label
            figures = (
                _number(row, key, digits) for row in found for key, digits in (("kl", 4), ("ratio", 3))
            )
            lines.append((str(bits), name, *figures))
    headers = (
        "bits",
        "codes",
        *(f"{title}, {what}" for title in MODELS.values() for what in ("KL", "device KV")),
    )
    return Table("", headers, tuple(lines))


def _free(rows: dict[str, Rows]) -> Table:
    lines = []
    for model, title in MODELS.items():
        for bits in (2, 1):
            for mode in ("greedy", "sampled"):
                for label in (DEFAULT, "keep", "query"):
                    row = find(rows[model], label, bits, mode, MAIN_LENGTH)
                    if row is None:
                        continue
                    figures = [
                        _number(row, key, 2) for key in ("until_difference", "full_loss", "exact_hit_rate")
                    ]
                    lines.append(
                        (title, str(bits), mode, label, *figures, _number(row, "attention_hit_rate", 3))
                    )
    measured = (
        "share before the first difference",
        "nats under the full cache",
        "token right",
        "attention captured",
    )
    return Table("", ("model", "bits", "", "", *measured), tuple(lines))


def _tasks(rows: dict[str, Rows]) -> Table:
    lines = []
    for label, bits in [
        ("full cache", None),
        *((label, bits) for bits in (2, 1) for label in ("KIVI", "paper", DEFAULT, "keep", "query", *CODES)),
    ]:
        found = [find(rows[model], label, bits, task, TASK_LENGTH) for model in MODELS for task in TASKS]
        if any(found):
            name = f"{label} codes" if label in CODES else label
            lines.append(
                ("16" if bits is None else str(bits), name, *(_number(row, "score", 3) for row in found))
            )
    headers = ("bits", "", *(f"{title}, {task}" for title in MODELS.values() for task in TASKS))
    return Table("", headers, tuple(lines))


def _candidates(rows: Rows) -> Table:
    lines = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        figures: list[str] = []
        for model in MODELS:
            for bits in (2, 1):
                row = next(
                    (r for r in rows if (r["rule"], r["model"], r["bits"]) == (rule, model, bits)), None
                )
                figures.append(_number(row, "kl", 4))
                if bits == 2:
                    figures.append(_number(row, "pairs_fetched_in_step", 0))
        lines.append((rule, *figures))
    headers = [
        f"{title}, {what}"
        for title in MODELS.values()
        for what in ("KL, 2 bits", "pairs in step", "KL, 1 bit")
    ]
    return Table("", ("rule", *headers), tuple(lines))


def _accepted(models: dict[str, dict[str, dict[str, Any]]]) -> Table:
    lines = []
    for model, measured in models.items():
        losses = {(row["kind"], row["method"], row["bits"]): row for row in measured["loss"]["rows"]}
        for row in measured["speed"]["rows"]:
            kls = (_number(losses.get((row["kind"], row["method"], bits)), "kl", 4) for bits in (2, 1))
            figures = _number(row, "median", 1), _number(row, "accepted", 2)
            lines.append((MODELS[model], row["kind"], row["method"], *figures, *kls))
    headers = ("model", "text", "", "tokens a second", "accepted", "KL, 2 bits", "KL, 1 bit")
    return Table("", headers, tuple(lines))


def find(rows: Rows, label: str, bits: int | None, mode: str, length: int) -> dict[str, Any] | None:
    """The row of a run, as `benchmarks.real.runs` names it; None where it is not there."""
    wanted = (label, bits, mode, length)
    of = ((row["label"], row["options"].get("bits"), row["mode"], row["length"]) for row in rows)
    return next((row for row, key in zip(rows, of, strict=True) if key == wanted), None)


def _number(row: dict[str, Any] | None, name: str, digits: int) -> str:
    value = None if row is None else row.get(name, row.get("stats", {}).get(name))
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text(), blocks(RESULTS)))
    README.write_text(renew(README.read_text(), readme_block(RESULTS)))
