"""An experiment is data: lines of methods, their tasks, columns; a table and a picture follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from specache_bench.experiments import style
from specache_bench.experiments.style import DASH, Table
from specache_bench.records import Job, Method, Record
from specache_bench.workloads import WORKLOADS, Prompts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tasks of our own model and those in English call the number of needles differently.
NEEDLES = {"suite": "num_keys", "english": "records"}
FULL = Method.of("full")
PRESSES = {"snapkv": "SnapKV", "h2o": "H2O", "tova": "TOVA", "streaming": "StreamingLLM"}


def kivi(bits: int, group_size: int = 64, **more: Any) -> Method:
    """KIVI as SpeCache §4.1 has it: 128 residual tokens, as much memory as SpeCache takes with its 64 prefetched."""
    return Method.of("kivi", bits=bits, group_size=group_size, **({"residual_length": 128} | more))


def specache(bits: int, group_size: int = 64, **more: Any) -> Method:
    """SpeCache as its §4.1 has it: 64 residual tokens, 64 prefetched pairs, KIVI's codes, Algorithm 3 to the letter."""
    settings = {"residual_length": 64, "top_k": 64, "quantizer": "kivi", "on_miss": "keep"} | more
    return Method.of("specache", bits=bits, group_size=group_size, **settings)


def kcache(num_values: int, layers: int) -> Method:
    """KCache: as in the paper no window of values stays on the device, and tokens are offloaded by fours."""
    return Method.of("kcache", top_k=num_values, resident_layers=layers, residual_length=0, group_size=4)


def press(name: str) -> Method:
    """A press of kvpress, to be given the bytes of another method (`Job.match`)."""
    return Method.of(f"press:{name}")


def quantized(backend: str, bits: int) -> Method:
    """Transformers' QuantizedCache, with groups and a window as KIVI's."""
    return Method.of("quantized", backend=backend, bits=bits, group_size=64, residual_length=128)


def label(method: Method) -> str:
    """As tables call it: "SpeCache 1-bit"."""
    options, name = dict(method.options), method.name
    if name == "kcache":
        return f"KCache N={options['top_k']} L={options['resident_layers']}"
    if name == "quantized":
        return f"{options['backend']} {options['bits']}-bit"
    return (
        "full cache"
        if name == "full"
        else f"{'KIVI' if name == 'kivi' else 'SpeCache'} {options['bits']}-bit"
    )


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

    @property
    def decode_ms(self) -> float:
        """Mean over tasks of the median time of a decode step."""
        return fmean(record.decode_ms or 0.0 for record in self.records)

    def stat(self, name: str) -> float | None:
        """Mean over tasks of one of the method's own figures; None where no task has it."""
        found = [value for record in self.records if (value := record.stats.get(name)) is not None]
        return fmean(found) if found else None


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

    A last column is a text, a function of the line's average, or another method, whose score is shown.
    """

    labels: tuple[str, ...]
    method: Method
    match: Method | None = None
    extra: tuple[str | Callable[[Average], str] | Method, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """One of the papers' experiments. Its lines run on every task of the scale.

    Attributes:
        name: Of its files.
        summary: A line for `--help`.
        caption: A few sentences for the page, about the table and the picture.
        title: Of the table.
        headers: Of the lines' labels; then come KV size, scores by task, their average.
        lines: At a scale.
        extra: Headers of the lines' last columns.
        notes: The papers' own tables.
        by_size: Lines are shown from few bytes to many.
        draw: Draws the picture into an empty figure; bars by line where there is none.
    """

    name: str
    summary: str
    caption: str
    title: str
    headers: tuple[str, ...]
    lines: Callable[[Scale], Sequence[Line]]
    extra: tuple[str, ...] = ()
    notes: tuple[Table, ...] = ()
    by_size: bool = False
    draw: Callable[[Results, Figure], None] | None = None

    def jobs(self, scale: Scale) -> list[Job]:
        """Its jobs at a scale."""
        found = []
        for line in self.lines(scale):
            found += scale.everywhere([line.method], line.match)
            found += scale.everywhere([one for one in line.extra if isinstance(one, Method)])
        return found

    def tables(self, results: Results) -> list[Table]:
        """Scores by task and their average with its standard error, bytes as a share of the full cache's."""
        scale, rows = results.scale, []
        tasks = [] if len(scale.tasks) == 1 else list(scale.tasks)
        found = [(line, results.over(line.method, line.match)) for line in self.lines(scale)]
        if self.by_size:
            found.sort(key=lambda pair: 9.0 if pair[1] is None else pair[1].ratio)
        for line, average in found:
            records = [results[job] for job in scale.everywhere([line.method], line.match)]
            by_task = (
                [DASH if record.missing else f"{record.score:.1f}" for record in records] if tasks else []
            )
            size = DASH if average is None else f"{average.ratio:.2f}x"
            more = [_extra(one, average, results) for one in line.extra]
            rows.append((*line.labels, size, *by_task, average_text(average), *more))
        names = (*self.headers, "KV size", *tasks, "average" if tasks else scale.tasks[0], *self.extra)
        return [Table(f"{self.title} ({scale})", names, tuple(rows)), *self.notes]

    def picture(self, results: Results, file: Path) -> None:
        """Draw into a file."""
        lines = self.lines(results.scale)
        with style.figure(7.5, 5.5 if self.draw else 1.2 + 0.24 * len(lines)) as drawn:
            if self.draw is not None:
                self.draw(results, drawn)
            else:
                shown = []
                for line in lines:
                    if (average := results.over(line.method, line.match)) is not None:
                        name = " ".join(text for text in line.labels if text not in ("", DASH))
                        name = f"{name}  ({average.ratio:.2f}x)"
                        shown.append(
                            (name, average.score, average.error, style.FAMILIES.get(line.method.name))
                        )
                style.bars(
                    drawn.subplots(), shown, f"{self.title}: score by {', '.join(filter(None, self.headers))}"
                )
            # No dates and versions inside: an equal picture is an equal file.
            drawn.savefig(file, metadata={"Software": None})


def _extra(one: str | Callable[[Average], str] | Method, average: Average | None, results: Results) -> str:
    if isinstance(one, Method):
        return average_text(results.over(one))
    return one if isinstance(one, str) else DASH if average is None else one(average)


def average_text(average: Average | None) -> str:
    """A score with its standard error."""
    return DASH if average is None else f"{average.score:.1f} ± {average.error:.1f}"


def stat(name: str, form: str = ".2f") -> Callable[[Average], str]:
    """A column of one of the method's own figures."""

    def text(average: Average) -> str:
        value = average.stat(name)
        return DASH if value is None else format(value, form)

    return text


def write(
    experiment: Any, scale: Scale, records: Mapping[str, Record], origin: Mapping[str, Any], out: Path
) -> None:
    """Write `<name>.json`, and its table and picture, into a folder.

    Args:
        experiment: Which.
        scale: How much was run.
        records: By `Job.key`, at least those of its jobs.
        origin: Device, versions, commit, command, model.
        out: The folder.
    """
    cells = []
    for job in {job.key: job for job in experiment.jobs(scale)}.values():
        record = records[job.key]
        # Predictions stay in records.jsonl.
        kept = {name: value for name, value in record.result.items() if name != "predictions"}
        made = {name: record.provenance.get(name) for name in ("commit", "date")}
        cells.append({"cell": job.to_json(), **kept, "missing": record.missing, "made": made})
    seconds = sum(cell.get("seconds", 0.0) for cell in cells)
    report = {
        "experiment": experiment.name,
        **origin,
        "scale": asdict(scale),
        "seconds": seconds,
        "cells": cells,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{experiment.name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    render(experiment, Results(scale, records), out)


def render(experiment: Any, results: Results, out: Path) -> None:
    """Write an experiment's tables and picture."""
    text = "\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in experiment.tables(results))
    (out / f"{experiment.name}.md").write_text(text + "\n", encoding="utf-8")
    experiment.picture(results, out / f"{experiment.name}.png")


def read(file: Path) -> tuple[Results, dict[str, Any]]:
    """What `write` wrote, today or before the laboratory had workloads: the records, and all of the JSON."""
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
    methods = [
        each and Method(each["name"], _pairs(each["options"])) for each in (saved["method"], saved["match"])
    ]
    assert methods[0] is not None
    return Job(methods[0], kind(**given), methods[1])


def _pairs(saved: list[list[Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in saved)
