"""Walk all model types: `python tests/architectures/walk.py`, or `make architectures`.

Each type is measured in a process of its own, with a time limit: a crash or a hang is a row, not the end. Rows that
this version of the code, torch and transformers has made already are kept, so an interrupted walk goes on where it was.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer
from architectures import table
from architectures.configs import TYPES, build
from architectures.measure import measure
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_FORK = multiprocessing.get_context("fork")  # the parent has imported what takes seconds to import


def _child(model_type: str, pipe: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # compilers and models are noisy; what matters is in the row
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pipe.send(measure(model_type))


def measure_apart(model_type: str, limit_s: float = 600) -> dict[str, Any]:
    """`measure` in a process of its own.

    Args:
        model_type: One of `TYPES`.
        limit_s: Seconds after which the process is ended.
    """
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(model_type, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return _broken(f"no answer after {limit_s:.0f} s")
        row: dict[str, Any] = ours.recv()
        return row
    except EOFError:
        process.join()
        return _broken(f"the process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        ours.close()


def _broken(reason: str) -> dict[str, Any]:
    return {"verdict": "error", "reason": reason}


@torch.no_grad()
def warm_up() -> None:
    """Import, before the forks, what every type needs."""
    model: Any = build("llama")
    model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2)
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    torch._dynamo.reset()
    gc.freeze()  # the children's collections need not look at what is imported


def main(
    only: Annotated[list[str] | None, typer.Argument(help="Types; all by default.")] = None,
    again: Annotated[
        bool, typer.Option(help="Measure those as well that this version has measured.")
    ] = False,
    limit: Annotated[float, typer.Option(help="Seconds that one type may take.")] = 600,
    jobs: Annotated[int, typer.Option(help="Types measured at a time.")] = max(os.cpu_count() or 1, 1),
) -> None:
    """Measure model types and write docs/architectures.json and docs/architectures.md."""
    unknown = [name for name in only or () if name not in TYPES]
    if unknown:
        raise typer.BadParameter(f"transformers knows no causal LM of type {', '.join(unknown)}")
    rows, started = table.load(), time.monotonic()
    rows = {name: row for name, row in rows.items() if name in TYPES}
    todo = [
        name for name in only or TYPES if again or rows.get(name, {}).get("version") != table.version(name)
    ]
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    with (
        Progress(*columns, console=console) as progress,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.ExitStack() as stack,
    ):
        task = progress.add_task("imports", total=len(todo))
        warm_up()
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        measured = {pool.submit(measure_apart, name, limit): name for name in todo}
        for done in as_completed(measured):
            name = measured[done]
            progress.update(task, description=name)
            row = {**done.result(), "version": table.version(name)}
            for line in table.worse(row, rows.get(name, row)):
                progress.console.print(f"[red]{name}: {line}", highlight=False)
            if row["verdict"] in table.BAD:
                progress.console.print(
                    f"[red]{name}: {row['verdict']}: {table.reasons(row)}", highlight=False
                )
            rows[name] = row
            table.save(rows)
            progress.advance(task)
    console.print(f"{len(todo)} types in {time.monotonic() - started:.0f} s; see {table.MARKDOWN}")


if __name__ == "__main__":
    typer.run(main)
