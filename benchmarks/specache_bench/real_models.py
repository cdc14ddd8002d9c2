"""How near each option comes to the full cache on trained models: `specache-bench real smollm2 gemma3`.

Windows of a novel (`make models`), read by the plain model; the last 256 tokens are fed one by one. Tasks have prompts
of their own. Rows go to `results/real_MODEL.json` one by one; a row that is there is not run again. The tables are
those of docs/real_models.md and README; some have rows that are kept (benchmarks/README.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_bench.experiments.style import DASH, Table
from specache_bench.lab import Lab
from specache_bench.records import Method
from specache_bench.workloads import Prompts, Windows
from specache_fx.provenance import git_commit, provenance

MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
LENGTHS = {"smollm2": (1024, 2048, 4096), "gemma3": (1024, 2048, 4096, 16384)}
MAIN_LENGTH, TASK_LENGTH = 2048, 1500
# Tasks where needles don't tell, as hard as both models manage with the full cache.
TASKS = ("table", "turns")
TEXT, SEED, WINDOWS, DECODED, PROMPTS = "austen", 0, 4, 256, 12
DEFAULT = "recover (default)"
# What follows a miss, with the default's codes; "none" selects in the same step, the bound of any guess.
GUESSES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "keep": {"on_miss": "keep"},
    "query": {"lookahead": "query"},
    "refetch": {"on_miss": "refetch"},
    "none": {"lookahead": "none"},
}
BUILT = {**GUESSES, "paper": {"quantizer": "kivi", "on_miss": "keep"}}
CODES = ("kivi", "rotated", "nuq", "zipcache")
MIXED = ("turboquant-k2v1", "turboquant-k1v2")  # no quantisers of the package: their rows are kept
_LARGE = ("kl_at", "loss_at", "same_top_at", "predictions")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One method in one mode ("forced" or a task) at one length, with its label in tables."""

    label: str
    method: Method
    mode: str
    length: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal runs, also from JSON."""
        return (self.method.name, *sorted(dict(self.method.options).items()), self.mode, self.length)

    @property
    def workload(self) -> Any:
        """Its prompts or windows."""
        if self.mode in TASKS:
            return Prompts(self.mode, self.length, PROMPTS, SEED)
        return Windows(TEXT, self.length, WINDOWS, SEED, DECODED)


def runs_of(model: str) -> Iterator[Run]:
    """All runs of a model; runs of one method follow each other."""
    main, tasks = [("forced", MAIN_LENGTH)], [(task, TASK_LENGTH) for task in TASKS]
    whole = [("forced", length) for length in LENGTHS[model]] + tasks
    named: list[tuple[str, Method, list[tuple[str, int]]]] = [("full cache", Method.of("full"), whole)]
    for bits in (2, 1):
        # With 128 residual tokens as much memory as with 64 and 64 prefetched.
        named.append(("KIVI", Method.of("kivi", bits=bits, residual_length=128), whole))
        for label, options in BUILT.items():
            where = main if label in ("refetch", "none") else whole
            named.append((label, Method.of("specache", bits=bits, **options), where))
        for name in CODES:
            named.append((name, Method.of("specache", bits=bits, quantizer=name), main + tasks))
    for label, method, where in named:
        yield from (Run(label, method, mode, length) for mode, length in where)


def measure(model: str, file: Path, wanted: Callable[[Run], bool], say: Callable[[str], object]) -> None:
    """Run what the file has not, and add it."""
    rows: Rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    there = {_key(row) for row in rows}
    runs = [run for run in runs_of(model) if run.key not in there and wanted(run)]
    if not runs:
        return
    commit = git_commit()  # before the file changes
    with Lab(model) as lab:
        for run in runs:
            found = run.workload.run(lab, run.method)
            if found.get("kl_at") is not None:
                found["kls"] = [sum(window) / len(window) for window in found["kl_at"]]
            row: dict[str, Any] = {
                "label": run.label,
                "mode": run.mode,
                "commit": commit,
                "length": run.length,
            }
            row |= {"method": run.method.name, "options": dict(run.method.options)}
            rows.append(row | {name: value for name, value in found.items() if name not in _LARGE})
            machine = provenance(lab.model.device)
            report: dict[str, Any] = {name: machine[name] for name in ("command", "device", "versions")}
            settings: dict[str, Any] = {
                "model": model,
                "dtype": str(lab.model.dtype),
                "text": TEXT,
                "seed": SEED,
                "windows": WINDOWS,
            }
            settings |= {"decoded": DECODED, "prompts": PROMPTS}
            report |= {"commits": sorted({row["commit"] for row in rows}), "settings": settings, "rows": rows}
            file.write_text(json.dumps(report, indent=1) + "\n")
            shown = [f"{name} {found[name]:.4f}" for name in ("kl", "score") if found.get(name) is not None]
            say(f"{run.label}, {run.method}, {run.mode}, {run.length:,}: {' '.join(shown)}")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row.get("method", "specache"), *sorted(row["options"].items()), row["mode"], row["length"])


# Tables.


def blocks(results: Path) -> dict[str, str]:
    """The tables of docs/real_models.md by their names."""
    rows = {model: json.loads((results / f"real_{model}.json").read_text())["rows"] for model in MODELS}
    tables = {
        "lengths": _lengths(rows),
        "misses": _misses(rows),
        "codes": _codes(rows),
        "tasks": _tasks(rows),
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
            columns = ("kl", 3), ("same_top", 2), ("perplexity", 1), ("ratio", 2)
            lines.append((title, name, *(_number(row, *column) for column in columns)))
    headers = ("model", "method", "KL to full", "top-1 = full", "perplexity", "device KV ratio")
    return {"real": Table("", headers, tuple(lines)).markdown()}


def _lengths(rows: dict[str, Rows]) -> Table:
    lengths = sorted({length for of_model in LENGTHS.values() for length in of_model})
    named: list[tuple[str, int | None]] = [("full cache", None)]
    named += [(name, bits) for bits in (2, 1) for name in ("KIVI", "paper", *GUESSES)]
    lines = []
    for model, title in MODELS.items():
        for label, bits in named:
            found = {length: find(rows[model], label, bits, "forced", length) for length in lengths}
            if (main := found[MAIN_LENGTH]) is not None:
                kls = (_number(row, "kl", 4) for row in found.values())
                head = (title, str(bits or 16), label)
                lines.append((*head, *kls, _number(main, "perplexity", 2), _number(main, "ratio", 2)))
    columns = (*(f"{n:,}" for n in lengths), f"perplexity at {MAIN_LENGTH:,}", "device KV")
    return Table("", ("model", "bits", "", *columns), tuple(lines))


def _misses(rows: dict[str, Rows]) -> Table:
    columns = {"KL": ("kl", 4), "top-1 = full": ("same_top", 2), "token right": ("exact_hit_rate", 2)}
    columns |= {"top-k hits": ("topk_hit_rate", 2), "attention captured": ("attention_hit_rate", 3)}
    lines = []
    for model, title in MODELS.items():
        for bits in (2, 1):
            for label in ("paper", *GUESSES):
                if (row := find(rows[model], label, bits, "forced", MAIN_LENGTH)) is not None:
                    lines.append((title, str(bits), label, *(_number(row, *one) for one in columns.values())))
    return Table("", ("model", "bits", "", *columns), tuple(lines))


def _codes(rows: dict[str, Rows]) -> Table:
    lines = []
    for bits in (2, 1):
        for label in (DEFAULT, *CODES, *(MIXED if bits == 2 else ())):
            found = [find(rows[model], label, bits, "forced", MAIN_LENGTH) for model in MODELS]
            figures = (
                _number(row, key, digits) for row in found for key, digits in (("kl", 4), ("ratio", 3))
            )
            lines.append((str(bits), "turboquant" if label == DEFAULT else label, *figures))
    columns = (f"{title}, {name}" for title in MODELS.values() for name in ("KL", "device KV"))
    return Table("", ("bits", "codes", *columns), tuple(lines))


def _tasks(rows: dict[str, Rows]) -> Table:
    named: list[tuple[str, int | None]] = [("full cache", None)]
    named += [
        (label, bits) for bits in (2, 1) for label in ("KIVI", "paper", DEFAULT, "keep", "query", *CODES)
    ]
    lines = []
    for label, bits in named:
        found = [find(rows[model], label, bits, task, TASK_LENGTH) for model in MODELS for task in TASKS]
        if any(found):
            name = f"{label} codes" if label in CODES else label
            lines.append((str(bits or 16), name, *(_number(row, "score", 3) for row in found)))
    columns = (f"{title}, {task}" for title in MODELS.values() for task in TASKS)
    return Table("", ("bits", "", *columns), tuple(lines))


def find(rows: Rows, label: str, bits: int | None, mode: str, length: int) -> dict[str, Any] | None:
    """The row of a run; None where it is not there."""
    wanted = (label, bits, mode, length)
    for row in rows:
        if (row["label"], row["options"].get("bits"), row["mode"], row["length"]) == wanted:
            return row
    return None


def _number(row: dict[str, Any] | None, name: str, digits: int) -> str:
    value = None if row is None else row.get(name, row.get("stats", {}).get(name))
    return DASH if value is None else f"{value:.{digits}f}"
