"""Records of a data set: from jsonl files, or from the hub."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError

Record = dict[str, Any]


def read_jsonl(file: Path, fields: Sequence[str]) -> list[Record]:
    """All records of a file, one in a line.

    Raises:
        ConfigError: On what is no UTF-8 or no JSON, or a record that lacks a field.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read as UTF-8 text ({error}).") from error
    records = []
    for number, line in enumerate(
        text.split("\n"), start=1
    ):  # JSON may hold what splitlines() takes for an end
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}, line {number} is no JSON ({error}).") from error
        records.append(_checked(record, fields, f"{file}, line {number}"))
    if not records:
        raise ConfigError(f"{file} has no records.")
    return records


def read_hub(name: str, config: str, fields: Sequence[str]) -> list[Record]:
    """All test records of a data set on the hub.

    Raises:
        ConfigError: If the library is not installed, the data set can't be had, or it has other fields.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "Data sets of the hub need the library `datasets`: pip install -e '.[eval]', or give --data a folder with"
            " jsonl files."
        ) from error
    try:
        split = datasets.load_dataset(name, config, split="test")
    except Exception as error:  # it raises whatever its file formats raise
        raise ConfigError(
            f"{name!r} is no folder here, and the hub's data set {name!r} with configuration {config!r} can't be loaded"
            f" ({str(error).strip().splitlines()[0]}). Give --data a folder with its jsonl files."
        ) from error
    return [_checked(dict(record), fields, f"{name}, {config}") for record in split]


def choose(records: Sequence[Record], num_prompts: int, seed: int, where: str) -> list[Record]:
    """So many of them, drawn by the seed, in the order of the data set.

    Raises:
        ConfigError: If there are fewer.
    """
    if num_prompts > len(records):
        raise ConfigError(
            f"{where} has {len(records)} records: ask for as many prompts or fewer, not {num_prompts}."
        )
    return [records[i] for i in sorted(random.Random(seed).sample(range(len(records)), num_prompts))]


def texts(record: Record, field: str, where: str) -> tuple[str, ...]:
    """The texts of a field that is a list of one or more.

    Raises:
        ConfigError: If it is something else: a text of its own would be taken for a list of letters.
    """
    value = record[field]
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(each, (str, int, float)) for each in value)
    ):
        raise ConfigError(f"{where}: {field!r} is {value!r:.60}, and should be a list of one or more texts.")
    return tuple(map(str, value))


def check_folder(data: str | Path) -> bool:
    """Whether the data are in a folder here, and not on the hub.

    Raises:
        ConfigError: If they are a file, or a path to nothing.
    """
    path = Path(data).expanduser()
    if path.is_file():
        raise ConfigError(f"{data} is a file: give --data the folder that it is in.")
    if not path.is_dir() and str(data).startswith(("/", ".", "~")):
        raise ConfigError(f"There is no folder {data}.")
    return path.is_dir()


def _checked(record: Any, fields: Sequence[str], where: str) -> Record:
    missing = [field for field in fields if not isinstance(record, dict) or field not in record]
    if missing:
        seen = f"it has {', '.join(record)}" if isinstance(record, dict) else "it is no object"
        raise ConfigError(
            f"{where}: there is no {', '.join(map(repr, missing))}; {seen}. Is it another data set?"
        )
    return dict(record)
