"""What `specache-fx eval` does: every method on every task, length and depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError
from specache_fx.eval.bench import Bench, Method
from specache_fx.eval.decode import Sampling
from specache_fx.eval.on_text import check_new_tokens
from specache_fx.eval.outcome import Measured
from specache_fx.eval.real import TEXTS, text_file
from specache_fx.eval.report import Row, make_row
from specache_fx.eval.request import needs_budget, read_spelling
from specache_fx.eval.sample import Sample
from specache_fx.eval.tasks import make_samples
from specache_fx.eval.text import read_windows


@dataclass(frozen=True)
class Cell:
    """What every method is run on.

    Attributes:
        task: Its name, or the text's file.
        length: Tokens asked for.
        depth: Of the needle; None where none was asked for.
        run: Runs a method, and tells how many prompts are done as they are.
    """

    task: str
    length: int
    depth: float | None
    run: Callable[[Method, Callable[[int], None]], Measured]


def task_cells(
    bench: Bench,
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    prompts: int,
    seed: int,
    batch_size: int,
    data: str | None = None,
    chat: bool = False,
) -> list[Cell]:
    """All combinations; their prompts are made and measured before anything runs.

    Args:
        bench: The model.
        tasks: Such as "multikey", "multikey,records=16", "ruler/vt".
        lengths: Tokens.
        depths: Of the needle; none for anywhere.
        prompts: For each.
        seed: Of the prompts.
        batch_size: Prompts at a time.
        data: Folder or name of a data set.
        chat: Use the chat template.

    Raises:
        ConfigError: If one can't be made, or is too long for the model.
    """
    cells = []
    wanted: Sequence[float | None] = depths or (None,)
    for spelling in tasks:
        task, knobs = read_spelling(spelling)
        if taken := {"num_prompts", "length", "seed", "depth", "data", "chat"} & knobs.keys():
            raise ConfigError(f"--task {spelling}: {', '.join(sorted(taken))} has an option of its own.")
        for length in lengths:
            for depth in wanted:
                samples = make_samples(
                    task,
                    bench,
                    num_prompts=prompts,
                    length=length,
                    seed=seed,
                    depth=depth,
                    data=data,
                    chat=chat,
                    **knobs,
                )
                bench.fitting(samples)
                cells.append(Cell(spelling, length, depth, _running(bench, samples, batch_size)))
    return cells


def text_cells(
    bench: Bench,
    text: str,
    lengths: Sequence[int],
    *,
    prompts: int,
    seed: int,
    batch_size: int,
    decoded: int = 64,
    new_tokens: int | None = None,
    temperature: float | None = None,
) -> list[Cell]:
    """Windows of a text, for each length: its own tokens, or how a method goes on behind it.

    Args:
        bench: The model.
        text: A file, or a name of `TEXTS`.
        lengths: Tokens of a window, those that are decoded included.
        prompts: Windows for each.
        seed: Of the windows, and of random tokens.
        batch_size: Windows at a time.
        decoded: See `Bench.perplexity`.
        new_tokens: Instead: see `Bench.continuation`.
        temperature: Of random tokens; greedy by default.

    Raises:
        ConfigError: If the text can't be read or is too short, or windows of a length can't be scored.
    """
    sampling = None if temperature is None else Sampling(temperature, seed)
    if new_tokens is not None:
        check_new_tokens(new_tokens, sampling)

    def scoring(windows: Any) -> Callable[[Method, Callable[[int], None]], Measured]:
        if new_tokens is None:
            return lambda method, progress: bench.perplexity(
                method, windows, decoded=decoded, batch_size=batch_size, progress=progress
            )
        return lambda method, progress: bench.continuation(
            method,
            windows[:, :-new_tokens],
            new_tokens=new_tokens,
            sampling=sampling,
            batch_size=batch_size,
            progress=progress,
        )

    file = text_file(text) if text in TEXTS else Path(text)
    drawn = {n: read_windows(bench.tokenizer, file, n, prompts, seed) for n in lengths}
    for windows in drawn.values():  # all before the first is run
        bench.check_windows(windows, new_tokens or decoded)
    return [
        Cell(file.stem if text in TEXTS else file.name, n, None, scoring(windows))
        for n, windows in drawn.items()
    ]


def run_all(
    cells: Sequence[Cell],
    methods: Sequence[Method],
    progress: Callable[[str, int], None] = lambda method, done: None,
) -> list[Row]:
    """Every method on every cell: one method after another, for each compiles once.

    Args:
        cells: What to run on.
        methods: Presses without a budget come last, and get the most bytes that SpeCache took on that cell.
        progress: Called with the method before its first batch (0 prompts done) and after each batch.

    Returns:
        Rows in the order of the cells.
    """
    rows: dict[tuple[int, int], Row] = {}
    budget = [0] * len(cells)
    for which, method in enumerate(methods):
        progress(str(method), 0)
        for where, cell in enumerate(cells):
            used = method
            if needs_budget(method):
                used = Method.of(method.name, **dict(method.options), bytes=budget[where])
            outcome = cell.run(used, lambda done, name=str(method): progress(name, done))  # type: ignore[misc]
            if method.name == "specache":
                budget[where] = max(budget[where], outcome.device_bytes)
            rows[where, which] = make_row(used, outcome, task=cell.task, length=cell.length, depth=cell.depth)
    return [rows[key] for key in sorted(rows)]


def _running(
    bench: Bench, samples: Sequence[Sample], batch_size: int
) -> Callable[[Method, Callable[[int], None]], Measured]:
    return lambda method, progress: bench.run(method, samples, batch_size=batch_size, progress=progress)
