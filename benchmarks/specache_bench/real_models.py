"""How near each option comes to the full cache on trained models: `specache-bench real smollm2 gemma3`.

Windows of a novel and of other texts (`make models`), read by the plain model; the last tokens are fed one by one.
Tasks have prompts of their own. Rows go to `results/real_MODEL.json` one by one; a row that is there is not run again.
Runs and tables are data, `real_models.toml`; some tables have rows that are kept (benchmarks/README.md).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_bench.lab import Lab
from specache_bench.records import Method, read_spelling
from specache_bench.report import Table
from specache_bench.workloads import Continuations, Prompts, Windows
from specache_fx.cli.provenance import provenance

_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MODELS: dict[str, Any] = _DATA["models"]
_SETTINGS, _WHERE = _DATA["settings"], _DATA["where"]
Rows = dict[str, list[dict[str, Any]]]
"""Of each model's report."""


@dataclass(frozen=True)
class Run:
    """One method in one mode at one length, with its label in tables.

    Modes: "forced" is the novel, "greedy" and "sampled" go on with it; else another text, or a task.
    """

    label: str
    method: Method
    mode: str
    length: int

    @property
    def workload(self) -> Any:
        """Its prompts or windows."""
        of = _SETTINGS
        if self.mode in _WHERE["tasks"]:
            return Prompts(self.mode, self.length, of["prompts"], of["seed"])
        if self.mode in _WHERE["texts"]:
            return Windows(self.mode, self.length, of["text_windows"], of["seed"], of["text_decoded"])
        if self.mode in _WHERE["free"]:
            sampled = self.mode == "sampled"
            return Continuations(
                of["text"], self.length, of["windows"], of["seed"], of["new_tokens"], sampled
            )
        return Windows(of["text"], self.length, of["windows"], of["seed"], of["decoded"])

    def row(self) -> dict[str, Any]:
        """Its name in a report."""
        named = {"label": self.label, "mode": self.mode, "length": self.length}
        return named | {"method": self.method.name, "options": dict(self.method.options)}


def runs_of(model: str) -> Iterator[Run]:
    """All runs of a model."""
    places = {
        "main": [("forced", _WHERE["main_length"])],
        "free": [(mode, _WHERE["main_length"]) for mode in _WHERE["free"]],
        "tasks": [(task, _WHERE["task_length"]) for task in _WHERE["tasks"]],
    }
    places["texts"] = [(text, length) for text in _WHERE["texts"] for length in _WHERE["text_lengths"]]
    places["long"] = [(text, _WHERE["long_length"]) for text in _WHERE["texts"]]
    places["whole"] = [("forced", length) for length in MODELS[model]["lengths"]] + places["tasks"]
    for bits, label, method, where in _lines(_DATA["runs"]["lines"]):
        if label in MODELS[model].get("without", ()):
            continue
        wide = Method.read(method) if bits == 16 else Method.read(method).having(bits=bits)
        for name in where.split():
            yield from (Run(label, wide, mode, length) for mode, length in places[name])


def measure(model: str, file: Path, say: Callable[[str], object]) -> None:
    """Run what the file has not, and add it. The head of a file is of its rows that have no command of their own."""
    report: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    rows = report["rows"]
    there = [_key({"method": "specache", **row}) for row in rows]
    runs = [run for run in runs_of(model) if _key(run.row()) not in there]
    if not runs:
        return
    with Lab(model) as lab:
        made = provenance(lab.model.device, program="specache-bench")  # before the file changes
        made["settings"] = {"model": model, "dtype": str(lab.model.dtype), **_SETTINGS}
        for run in runs:
            found = run.workload.run(lab, run.method)
            found.pop("predictions", None)
            rows.append({**run.row(), **made, **found})
            file.write_text(json.dumps(report, indent=1) + "\n")
            shown = [f"{name} {found[name]:.4f}" for name in ("kl", "score") if found.get(name) is not None]
            say(f"{run.label}, {run.method}, {run.mode}, {run.length:,}: {' '.join(shown)}")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for equal runs, whatever their labels."""
    return (row["method"], row["options"], row["mode"], row["length"])


def read(results: Path) -> Rows:
    """The rows of both models, from the folder of the results."""
    return {model: json.loads((results / f"real_{model}.json").read_text())["rows"] for model in MODELS}


def find(
    rows: Rows, model: str, label: str, bits: int | None, mode: str = "forced", length: int | None = None
) -> dict[str, Any] | None:
    """The row of a run, at the main length by default; None where it is not there."""
    wanted = (label, bits, mode, length or _WHERE["main_length"])
    for row in rows[model]:
        if (row["label"], row["options"].get("bits"), row["mode"], row["length"]) == wanted:
            return row
    return None


def tables(rows: Rows) -> dict[str, str]:
    """All tables by their names, in Markdown; without those of which nothing was run."""
    made = {name: _table(rows, section) for name, section in _DATA["tables"].items()}
    return {name: table.markdown() for name, table in made.items() if table.rows}


def _table(rows: Rows, section: Mapping[str, Any]) -> Table:
    """Lines of which nothing was run are left out."""
    columns = [(header, *read_spelling(which)) for header, which in _cells(section["columns"])]
    lines: list[dict[str, Any]] = []
    for model in MODELS if section["by_model"] else [None]:
        for bits, label, *shown in _lines(section["rows"]):
            run: dict[str, Any] = {"label": label, "bits": None if bits == 16 else bits}
            run |= {"model": model} if model else {}
            found = {header: find(rows, **run, **more) for header, _, more in columns}
            if any(found.values()):
                named = {"model": MODELS[model]["title"] if model else "", "bits": bits}
                others = dict.fromkeys(section["labels"], shown[0] if shown else label)
                lines.append(others | named | found)
    front = {label: label for label in section["labels"]}
    return Table.of(front | {header: f"{header}/{figure}" for header, figure, _ in columns}, lines)


def _lines(text: str) -> Iterator[tuple[Any, ...]]:
    """Bits and further cells of each line, which begins with its widths; those of more bits first."""
    for bits in (16, 4, 2, 1):
        yield from ((bits, *cells) for widths, *cells in _cells(text) if str(bits) in widths.split())


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
