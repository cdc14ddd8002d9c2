"""How near each option comes to the full cache on trained models: `python -m benchmarks.real smollm2 gemma3`.

Windows of a novel (`make models`), read by the plain model; the last 256 tokens are decoded. Forced, they are the
text's own: perplexity, KL divergence to the full cache and top-1 agreement with it. Greedy and sampled, the model goes
on by itself for 128. Tasks have prompts of their own. Each result is written at once, and what is there is not run
again: delete a JSON to run it anew.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.real.misses import follow
from benchmarks.real.mixed import register
from benchmarks.real.runs import (
    DECODED,
    LENGTHS,
    NEW_TOKENS,
    PROMPTS,
    SEED,
    TASK_LENGTH,
    TASKS,
    TEMPERATURE,
    TEXT,
    WINDOWS,
    Run,
    runs_of,
)
from specache_fx.eval.bench import Bench
from specache_fx.eval.decode import Sampling
from specache_fx.eval.outcome import Measured
from specache_fx.eval.real import text_file
from specache_fx.eval.report import make_row
from specache_fx.eval.tasks import make_samples
from specache_fx.eval.text import read_windows
from specache_fx.provenance import git_commit, provenance
from specache_fx.quiet import quiet


def main(
    models: Annotated[list[str], typer.Argument(help=f"Of {', '.join(LENGTHS)}.")],
    out: Annotated[Path, typer.Option(help="Folder for the JSON of each model.")] = Path("results"),
    only: Annotated[str | None, typer.Option(help="Runs whose label has this in it.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="forced, greedy, sampled, misses, table or turns alone.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Windows of this length alone.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Measure what is not there yet."""
    register()
    if unknown := set(models) - set(LENGTHS):
        raise typer.BadParameter(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(LENGTHS)}.")
    for model in models:
        wanted = [
            run
            for run in runs_of(model)
            if (only is None or only in run.label)
            and mode in (None, run.mode)
            and length in (None, run.length)
        ]
        with quiet(threads):
            measure(model, wanted, out / f"real_{model}.json")


def measure(model: str, wanted: list[Run], file: Path) -> None:
    """Run what the file has not, and add it."""
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.is_file() else []
    there = {_key(row) for row in rows}
    wanted = [run for run in wanted if run.key not in there]
    if not wanted:
        return
    commit = git_commit()  # before the file changes
    with Bench(model) as bench:
        windows = {
            length: read_windows(bench.tokenizer, text_file(TEXT), length, WINDOWS, SEED)
            for length in sorted({run.length for run in wanted if run.mode not in TASKS})
        }
        settings = {
            "model": model,
            "dtype": str(bench.model.dtype),
            "text": TEXT,
            "seed": SEED,
            "windows": WINDOWS,
            "decoded": DECODED,
            "new_tokens": NEW_TOKENS,
            "temperature": TEMPERATURE,
            "prompts": PROMPTS,
        }
        for run in wanted:
            began = time.perf_counter()
            row = {
                "label": run.label,
                "mode": run.mode,
                "commit": commit,
                **_row(bench, run, windows.get(run.length)),
            }
            rows.append(row)
            machine = provenance(bench.model.device)
            report = {
                "command": "python -m benchmarks.real smollm2 gemma3",
                **{name: machine[name] for name in ("device", "versions")},
                "commits": sorted({row["commit"] for row in rows}),
                "settings": settings,
                "rows": rows,
            }
            file.write_text(json.dumps(report, indent=1) + "\n")
            shown = [
                f"{name} {row[name]:.4f}"
                for name in ("kl", "agreement", "score")
                if row.get(name) is not None
            ]
            print(run, *shown, f"{time.perf_counter() - began:.0f} s", flush=True)  # noqa: T201


def _row(bench: Bench, run: Run, windows: Any) -> dict[str, Any]:
    if run.mode == "misses":
        bench.close()
        found = follow(bench, windows, DECODED, **dict(run.options))
        return {"options": dict(run.options), "length": run.length, **found}
    outcome: Measured
    if run.mode in TASKS:
        samples = make_samples(run.mode, bench, num_prompts=PROMPTS, length=TASK_LENGTH, seed=SEED)
        outcome = bench.run(run.method, samples)
    elif run.mode == "forced":
        outcome = bench.perplexity(run.method, windows, decoded=DECODED, batch_size=WINDOWS)
    else:
        sampling = Sampling(TEMPERATURE, SEED) if run.mode == "sampled" else None
        outcome = bench.continuation(
            run.method, windows[:, :-NEW_TOKENS], new_tokens=NEW_TOKENS, sampling=sampling, batch_size=WINDOWS
        )
    task = run.mode if run.mode in TASKS else TEXT
    row = make_row(run.method, outcome, task=task, length=run.length)
    if row.get("kl_at") is not None:
        row["kls"] = [sum(window) / len(window) for window in row["kl_at"]]
    # By position they are many: `specache-fx eval --text austen --json` has them.
    return {
        name: value
        for name, value in row.items()
        if name not in ("kl_at", "loss_at", "same_top_at", "ids", "predictions")
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row.get("method", "specache"), *sorted(row["options"].items()), row["mode"], row["length"])


if __name__ == "__main__":
    typer.run(main)
