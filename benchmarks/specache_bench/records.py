"""What is run and what came of it: a `Method` on a workload is a `Job`, which gives a `Record`, a line of JSON."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError

# Of a record's provenance: what its numbers depend on. A record that differs in one of these is not taken again.
CONDITIONS = ("model", "model_fingerprint", "dtype", "batch_size", "device", "versions", "code", "peers")


@dataclass(frozen=True)
class Method:
    """A way of decoding.

    Attributes:
        name: In `specache_bench.methods.METHODS`.
        options: Names and values.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, **options: Any) -> Method:
        """`Method.of("specache", bits=1)`. Equal methods are equal jobs, in whatever order their options are given."""
        return cls(name, tuple(sorted(options.items())))

    @classmethod
    def read(cls, text: str) -> Method:
        """From "specache,bits=1,top_k=32"."""
        name, options = read_spelling(text)
        return cls.of(name, **options)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Job:
    """A method on a workload.

    Attributes:
        method: The method.
        workload: The workload, a frozen dataclass of `specache_bench.workloads`.
        match: A method whose device bytes on this workload `method` is given as its budget.
    """

    method: Method
    workload: Any
    match: Method | None = None

    @property
    def key(self) -> str:
        """Canonical JSON: equal for equal jobs, also between processes."""
        return json.dumps(self.to_json(), sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """As records and reports have it."""
        return {
            "method": asdict(self.method),
            "workload": {"kind": self.workload.kind, **asdict(self.workload)},
            "match": None if self.match is None else asdict(self.match),
        }

    def __str__(self) -> str:
        return f"{self.method} on {self.workload}"


@dataclass(frozen=True)
class Record:
    """What a job gave.

    Attributes:
        result: By name; bytes are of one sequence at the end. See the workload for what is in it.
        missing: Why the job was not run; the result is empty then.
        provenance: Command, commit, date, machine, versions, and all else of `CONDITIONS`.
    """

    result: dict[str, Any] = field(default_factory=dict)
    missing: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["result"][name]
        except KeyError:
            raise AttributeError(f"the record has no {name!r}") from None

    @property
    def score(self) -> float:
        """Mean score, 0 to 100."""
        scores = self.result["scores"]
        return 100 * sum(scores) / len(scores)


class Store:
    """Records in a file, a line of JSON each, written at once, and found again where all conditions agree.

    Args:
        file: Made when the first record is put.
        conditions: Those of this run, by the names of `CONDITIONS`.
    """

    def __init__(self, file: Path | None, conditions: Mapping[str, Any]) -> None:
        self._file = file
        self._conditions = json.loads(json.dumps(conditions))  # as JSON gives it back
        self._found: dict[str, Record] = {}
        self._others: dict[str, dict[str, Any]] = {}
        for line in _lines(file):
            key = json.dumps(line["job"], sort_keys=True)
            made = {name: line["provenance"].get(name) for name in CONDITIONS}
            if made == self._of(line["job"]):
                self._found[key] = Record(line["result"], None, line["provenance"])
            else:
                self._others[key] = made

    def _of(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Only presses depend on what is in their environment."""
        made = {name: self._conditions.get(name) for name in CONDITIONS}
        return made if job["method"]["name"].startswith("press:") else made | {"peers": None}

    def get(self, job: Job) -> Record | None:
        """The job's record, if it was made under these conditions."""
        return self._found.get(job.key)

    def put(self, job: Job, record: Record) -> Record:
        """Keep a record with its provenance; it is on disk when this returns."""
        record = Record(record.result, None, {**record.provenance, **self._of(job.to_json())})
        self._found[job.key] = record
        if self._file is not None:
            line = {"job": job.to_json(), "provenance": record.provenance, "result": record.result}
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a+b") as file:
                # An interrupted write leaves half a line: what follows it begins on a line of its own.
                file.write((b"" if _ends_a_line(file) else b"\n") + json.dumps(line).encode() + b"\n")
        return record

    def made_otherwise(self, jobs: Sequence[Job]) -> dict[str, int]:
        """Of jobs that are there under other conditions alone: which condition differs, and for how many."""
        differing: Counter[str] = Counter()
        for job in jobs:
            if job.key in self._others and job.key not in self._found:
                other, ours = self._others[job.key], self._of(job.to_json())
                differing.update(name for name in CONDITIONS if other[name] != ours[name])
        return dict(sorted(differing.items()))


def _lines(file: Path | None) -> list[dict[str, Any]]:
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines() if file is not None and file.is_file() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue  # half a line: the record that was being written when the run was ended
    return lines


def _ends_a_line(file: Any) -> bool:
    if not file.tell():
        return True
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


def read_spelling(text: str) -> tuple[str, dict[str, Any]]:
    """Read "name,option=value,..." as a name and its options: numbers, True, False, None, and all else as text.

    Raises:
        ConfigError: If it is spelt otherwise.
    """
    name, *parts = (part.strip() for part in text.split(","))
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not option or not equals:
            raise ConfigError(
                f"{text!r}: {part!r} is no option. Write name,option=value,...: specache,bits=1,top_k=32."
            )
        if option in options:
            raise ConfigError(f"{text!r}: {option!r} is given twice.")
        try:
            options[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[option] = {"true": True, "false": False}.get(value.lower(), value)
    return name, options


def made_now(commit: str | None, command: str) -> dict[str, Any]:
    """What a record says of its making beside its conditions."""
    return {"commit": commit, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command}
