"""Jobs and their records: a `Method` on a workload is a `Job`, which gives a `Record`, a line of JSON."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError

# Of a record's provenance: what its numbers depend on. A record that differs in one of these is not taken again.
CONDITIONS = ("model", "model_fingerprint", "dtype", "batch_size", "device", "versions", "code", "peers")


@dataclass(frozen=True)
class Method:
    """A way of decoding: a name of `specache_bench.methods.METHODS`, and its options by name."""

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

    def having(self, **options: Any) -> Method:
        """With these options instead of its own."""
        return Method.of(self.name, **(dict(self.options) | options))

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Job:
    """A method on a workload. `match` is a method whose device bytes on this workload it is given as its budget."""

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
    """The result of a job, in its workload's form. `missing` is why it was not run, if it was not.

    Provenance has the command, commit and date, and all of `CONDITIONS`.
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
    """Records in a file, a line of JSON each, written at once, and found again where all of `CONDITIONS` agree."""

    def __init__(self, file: Path | None, conditions: Mapping[str, Any]) -> None:
        self._file = file
        self._conditions = json.loads(json.dumps(conditions))  # as JSON gives it back
        self._found: dict[str, Record] = {}
        text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
        # An interrupted write leaves half a line: what follows it begins on a line of its own.
        self._gap = "\n" if text and not text.endswith("\n") else ""
        for saved in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(saved)
                made = {name: line["provenance"].get(name) for name in CONDITIONS}
                if made == self._of(line["job"]):
                    key = json.dumps(line["job"], sort_keys=True)
                    self._found[key] = Record(line["result"], None, line["provenance"])

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
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{self._gap}{json.dumps(line)}\n")
            self._gap = ""
        return record


def read_spelling(text: str) -> tuple[str, dict[str, Any]]:
    """Read "name,option=value,..." as a name and its options: numbers, True, False, None, and all else as text."""
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


_KINDS = {bool: "True or False", int: "a whole number >= 0", float: "a number", str: "a text"}


def check_options(what: str, given: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """A `ConfigError` on an option that is unknown, or has another type than its default or its example.

    Args:
        what: Begins the message: "Method 'roomy'".
        given: Options by name.
        like: Defaults or examples by name; where it is None, all types are taken.
    """
    if unknown := [name for name in given if name not in like]:
        known = f"Valid options: {', '.join(like)}." if like else "It has no options."
        raise ConfigError(f"{what} has no option {', '.join(map(repr, unknown))}. {known}")
    for name, value in given.items():
        kind, own = type(like[name]), type(value)
        right = own is kind or (kind is float and own is int) or like[name] is None
        if not right or (kind is int and value < 0):
            raise ConfigError(f"{what}: {name}={value}: give {_KINDS[kind]}.")
