"""Parts of all commands: options that are checked before the work, a progress bar, and errors without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specache_fx.cli.sizes import DTYPE_BYTES
from specache_fx.errors import SpecacheError

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there too.")]

Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice by default.")]


@contextmanager
def as_bad_parameter() -> Iterator[None]:
    """This package's errors end in a usage message and exit code 2, not in a traceback."""
    try:
        yield
    except SpecacheError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def progress_bar(console: Console, threads: int | None) -> Iterator[Progress]:
    """A bar; the terminal is its alone, and this package's errors end in a usage message."""
    from specache_fx.cli.quiet import quiet

    columns = (
        TextColumn("{task.description:<40.40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, quiet(threads), as_bad_parameter():
        yield progress


def check_dtype(dtype: str) -> None:
    """Complain about a dtype that is none."""
    if dtype not in DTYPE_BYTES:
        raise typer.BadParameter(f"--dtype {dtype}: choose one of {', '.join(DTYPE_BYTES)}.")


def check_folder(file: Path | None, option: str = "--json") -> None:
    """Complain about a file that an option names before the work, not after it."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{option} {file}: give a file in a folder that exists.")


def write_json(file: Path | None, report: Any) -> None:
    """Write a report, if a file is given."""
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
