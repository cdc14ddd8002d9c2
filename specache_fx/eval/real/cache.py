"""The folder outside the repository that keeps models and texts, and what is whole in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from specache_fx.errors import ConfigError
from specache_fx.eval.real.sources import MODELS, TEXTS, Model, Text
from specache_fx.runtime.library_cache import user_folder

VARIABLE = "SPECACHE_DATA"
RECORD = "made.json"


def cache_folder() -> Path:
    """`$SPECACHE_DATA`, else the folder of the user's that built libraries are in; it need not be there yet.

    Raises:
        ConfigError: If `$SPECACHE_DATA` is no absolute path, or there is no home folder.
    """
    if named := os.environ.get(VARIABLE):
        folder = Path(named).expanduser()
        if not folder.is_absolute():
            raise ConfigError(f"{VARIABLE}={named}: give an absolute path.")
        return folder
    try:
        return user_folder()
    except RuntimeError as error:
        raise ConfigError(
            f"There is no home folder to keep models in: set {VARIABLE} to a folder."
        ) from error


def model_folder(name: str) -> Path:
    """The folder of a model of `MODELS`.

    Raises:
        ConfigError: If it was not made yet, or not whole.
    """
    folder = cache_folder() / "models" / name
    if not is_whole(folder, MODELS[name]):
        raise ConfigError(
            f"The model {name!r} is not in {folder}: fetch it with `make models`, or with `specache-fx models {name}`."
        )
    return folder


def text_file(name: str) -> Path:
    """The file of a text of `TEXTS`.

    Raises:
        ConfigError: If it was not made yet.
    """
    folder = cache_folder() / "texts" / name
    if not is_whole(folder, TEXTS[name]):
        raise ConfigError(
            f"The text {name!r} is not in {folder}: fetch it with `make models`, or with `specache-fx models {name}`."
        )
    return folder / f"{name}.txt"


def is_whole(folder: Path, source: Model | Text) -> bool:
    """Whether a folder was made from this source and its files have the sizes that they were made with."""
    try:
        record = json.loads((folder / RECORD).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(record["sha256"] == source.sha256 and sizes == record["sizes"])


def write_record(folder: Path, source: Model | Text) -> None:
    """Write down what a folder was made from and how large its files are."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    record = {"sha256": source.sha256, "licence": source.licence, "sizes": sizes}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
