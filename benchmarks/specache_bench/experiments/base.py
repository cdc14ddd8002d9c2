"""An experiment is a section of `papers.toml`: lines of methods and columns; a table and a picture follow from it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from specache_bench.experiments import style
from specache_bench.records import Job, Method, Record, read_spelling
from specache_bench.report import DASH, Table
from specache_bench.workloads import WORKLOADS, Prompts
from specache_fx.cli.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))


def paper_method(spelling: str) -> Method:
    """A method with the papers' settings where it doesn't say otherwise: "specache,bits=1"."""
    method = Method.read(spelling)
    settings = DATA["settings"].get(method.name)
    _, given = read_spelling(method.name + (f",{settings}" if settings else ""))
    return Method.of(method.name, **{**given, **dict(method.options)})


@dataclass(frozen=True)
class Scale:
    """How much is run: the model, tasks that scores are averaged over, tokens and number of prompts, their seed."""

    model: str
    tasks: tuple[str, ...]
    length: int
    prompts: int
    seed: int
    quick: bool = False

    def everywhere(self, methods: Iterable[Method], match: Method | None = None) -> list[Job]:
        """A job of each method on each task."""
        prompts = [Prompts(task, self.length, self.prompts, self.seed) for task in self.tasks]
        return [Job(method, one, match) for method in methods for one in prompts]

    def __str__(self) -> str:
        return f"{self.prompts} prompts of {self.length:,} tokens for each task"


@dataclass(frozen=True)
class Average:
    """A method over several tasks, which weigh the same."""

    records: tuple[Record, ...]

    @property
    def score(self) -> float:
        """Mean of the tasks' mean scores, 0 to 100."""
        return fmean(record.score for record in self.records)

    @property
    def error(self) -> float:
        """Standard error of `score`: prompts are drawn at random within each task."""
        parts = []
        for record in self.records:
            mean, number = fmean(record.scores), len(record.scores)
            parts.append(sum((score - mean) ** 2 for score in record.scores) / max(number - 1, 1) / number)
        return float(100 * sum(parts) ** 0.5 / len(parts))

    @property
    def ratio(self) -> float:
        """Device bytes to the full cache's: the papers' "KV cache size"."""
        return float(sum(r.device_bytes for r in self.records) / sum(r.full_bytes for r in self.records))

    def stat(self, name: str) -> float | None:
        """Mean over tasks of one of the method's own figures; None where no task has it."""
        found = [value for record in self.records if (value := record.stats.get(name)) is not None]
        return fmean(found) if found else None

    def cell(self, text: str) -> str:
        """A figure as a column shows it: "ms" and others below; or one of `stat`'s, as "topk_hit_rate:.2f"."""
        steps, moved, again = (self.stat(n) for n in ("steps", "prefetched_bytes", "refetched_steps"))
        if text == "ms":
            return f"{fmean(record.decode_ms or 0.0 for record in self.records):.1f}"
        if text == "fetched":
            return format_size(moved / steps) if steps and moved else DASH
        if text == "twice":
            return DASH if not steps or again is None else f"{again / steps:.2f}"
        name, _, form = text.partition(":")
        value = self.stat(name)
        return DASH if value is None else format(value, form or ".2f")

    def __str__(self) -> str:
        return f"{self.score:.1f} ± {self.error:.1f}"


class Results:
    """The records of jobs at a scale."""

    def __init__(self, scale: Scale, records: Mapping[str, Record]) -> None:
        self.scale, self._records = scale, records

    def __getitem__(self, job: Job) -> Record:
        return self._records[job.key]

    def over(self, method: Method, match: Method | None = None) -> Average | None:
        """A method's average over the scale's tasks; None where a task is missing."""
        records = [self[job] for job in self.scale.everywhere([method], match)]
        return None if any(record.missing for record in records) else Average(tuple(records))


@dataclass(frozen=True)
class Line:
    """A line of a table: its first columns, the method (with another one's bytes), its last columns.

    A last column is a text, "=" and a figure of the line's average, or "=score METHOD".
    """

    labels: tuple[str, ...]
    method: Method
    match: Method | None
    cells: tuple[str, ...]
    quick: bool

    @classmethod
    def read(cls, text: str, num_labels: int, extra: list[list[str]]) -> Line:
        """From a line of `papers.toml`."""
        cells = [cell.strip() for cell in text.removeprefix("*").split("|")]
        method, _, match = cells[num_labels].partition(" at ")
        defaults = [column[1] if len(column) > 1 else DASH for column in extra]
        given = cells[num_labels + 1 :] or [""] * len(extra)
        last = tuple(cell or default for cell, default in zip(given, defaults, strict=True))
        own, other = paper_method(method), paper_method(match) if match else None
        return cls(tuple(cells[:num_labels]), own, other, last, text.startswith("*"))

    @property
    def others(self) -> list[Method]:
        """Methods whose scores are shown in last columns."""
        return [paper_method(cell[7:]) for cell in self.cells if cell.startswith("=score ")]

    def last(self, average: Average | None, results: Results) -> list[str]:
        """The text of its last columns."""
        found = []
        for cell in self.cells:
            if cell.startswith("=score "):
                found.append(str(results.over(paper_method(cell[7:])) or DASH))
            elif cell.startswith("="):
                found.append(DASH if average is None else average.cell(cell[1:]))
            else:
                found.append(cell)
        return found


@dataclass(frozen=True)
class Experiment:
    """One of the papers' experiments. Its lines run on every task of the scale.

    Attributes:
        name: Of its files.
        summary: A line for `--help`.
        title: Of the table.
        headers: Of the lines' labels; then come KV size, scores by task, their average.
        extra: Headers of the lines' last columns.
        every_line: Of a run that is not quick.
    """

    name: str
    summary: str
    title: str
    headers: tuple[str, ...]
    extra: tuple[str, ...]
    every_line: tuple[Line, ...]

    @classmethod
    def read(cls, name: str, section: Mapping[str, Any]) -> Self:
        """From a section of `papers.toml`."""
        headers, extra = tuple(section["headers"]), section.get("extra", [])
        lines = [Line.read(line, len(headers), extra) for line in section["lines"].strip().splitlines()]
        names = tuple(column[0] for column in extra)
        return cls(name, section["summary"], section["title"], headers, names, tuple(lines))

    def lines(self, scale: Scale) -> list[Line]:
        """At a scale; a quick run doesn't spend its time compiling."""
        if not scale.quick:
            return [*self.every_line]
        lines = [line for line in self.every_line if line.quick] or self.every_line
        compiled = [line for line in lines if "lowering" in dict(line.method.options)]
        return [
            replace(line, method=line.method.having(lowering="eager")) if line in compiled else line
            for line in lines
        ]

    def jobs(self, scale: Scale) -> list[Job]:
        """Its jobs at a scale."""
        found = []
        for line in self.lines(scale):
            found += scale.everywhere([line.method], line.match)
            found += scale.everywhere(line.others)
        return found

    def averages(self, results: Results) -> list[tuple[Line, Average | None]]:
        """Its lines in the table's order, with their results."""
        return [(line, results.over(line.method, line.match)) for line in self.lines(results.scale)]

    def table(self, results: Results) -> Table:
        """Scores by task and their average with its standard error, bytes as a share of the full cache's."""
        scale, rows = results.scale, []
        tasks = [] if len(scale.tasks) == 1 else list(scale.tasks)
        for line, average in self.averages(results):
            records = [results[job] for job in scale.everywhere([line.method], line.match)]
            by_task = [DASH if record.missing else f"{record.score:.1f}" for record in records if tasks]
            size = DASH if average is None else f"{average.ratio:.2f}x"
            rows.append((*line.labels, size, *by_task, str(average or DASH), *line.last(average, results)))
        names = (*self.headers, "KV size", *tasks, "average" if tasks else scale.tasks[0], *self.extra)
        return Table(f"{self.title} ({scale})", names, tuple(rows))

    def draw(self, results: Results, figure: Figure) -> None:
        """Bars by line."""
        lines = [(line, average) for line, average in self.averages(results) if average is not None]
        figure.set_size_inches(7.5, 1.2 + 0.24 * len(self.lines(results.scale)))
        bars = []
        for line, average in lines:
            name = " ".join(text for text in line.labels if text not in ("", DASH))
            shown = f"{name}  ({average.ratio:.2f}x)"
            bars.append((shown, average.score, average.error, line.method.name))
        title = f"{self.title}: score by {', '.join(filter(None, self.headers))}"
        style.bars(figure.subplots(), bars, title)


def write(
    experiment: Experiment, scale: Scale, records: Mapping[str, Record], origin: Mapping[str, Any], out: Path
) -> Table:
    """Write `<name>.json`, from records by `Job.key` and what they come of, and `<name>.png`; give the table."""
    cells = []
    for job in {job.key: job for job in experiment.jobs(scale)}.values():
        record = records[job.key]
        # Predictions stay in records.jsonl.
        kept = {name: value for name, value in record.result.items() if name != "predictions"}
        made = {name: record.provenance.get(name) for name in ("commit", "date")}
        cells.append({"cell": job.to_json(), **kept, "missing": record.missing, "made": made})
    seconds = sum(cell.get("seconds", 0.0) for cell in cells)
    report = {"experiment": experiment.name, **origin, "scale": asdict(scale), "seconds": seconds}
    report["cells"] = cells
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{experiment.name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    results = Results(scale, records)
    render(experiment, results, out)
    return experiment.table(results)


def render(experiment: Experiment, results: Results, out: Path) -> None:
    """Write an experiment's picture."""
    with style.figure() as figure:
        experiment.draw(results, figure)
        # No dates and versions inside: an equal picture is an equal file.
        figure.savefig(out / f"{experiment.name}.png", metadata={"Software": None})


def read(file: Path) -> tuple[Results, dict[str, Any]]:
    """The records of a file that `write` wrote, today or before the laboratory had workloads, and all of its JSON."""
    report = json.loads(file.read_text(encoding="utf-8"))
    scale = Scale(**{**report["scale"], "tasks": tuple(report["scale"]["tasks"])})
    records = {}
    for saved in report["cells"]:
        result = {name: value for name, value in saved.items() if name not in ("cell", "missing", "made")}
        records[to_job(saved["cell"]).key] = Record(result, saved["missing"], saved["made"])
    return Results(scale, records), report


def to_job(saved: Mapping[str, Any]) -> Job:
    """A job as JSON has it."""
    given = dict(saved.get("workload") or {"kind": "prompts", **saved["prompts"]})
    kind = WORKLOADS[given.pop("kind")]
    given["knobs"] = _pairs(given["knobs"])
    method, match = (
        each and Method(each["name"], _pairs(each["options"])) for each in (saved["method"], saved["match"])
    )
    return Job(method, kind(**given), match)


def _pairs(saved: list[list[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in saved)
