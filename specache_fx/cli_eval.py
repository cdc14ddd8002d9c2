"""`specache-fx eval`: any method on any task with any model, on the same prompts.

What needs torch is imported inside the command, so that `--help` and bad options answer at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specache_fx.cli_common import JsonFile, as_bad_parameter, check_dtype, check_folder

_METHODS = ["full", "specache", "kivi"]


def eval_command(
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="single, multikey, multivalue, multiquery, tracking, frequent, copying, topics, table, turns,"
            " ruler/NAME or longbench/NAME; knobs as in multikey,records=16. Several: repeat it.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Instead: decode this text; or austen or kjv, of make models."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Folder or name of a transformers model; needle, suite (ours); smollm2, gemma3 (make models)."
        ),
    ] = "needle",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="full, specache, kivi, kcache, quantized, offloaded, press:snapkv, ...; options as in"
            f" specache,bits=1,top_k=32. Several: repeat it. [default: {', '.join(_METHODS)}]",
        ),
    ] = None,
    bits: Annotated[list[int] | None, typer.Option(help="Widths, for methods that have one.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of prompt and answer. [default: 1000]")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the needle lies, 0 to 1; anywhere by default.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, or windows of the text, for each.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of equal length at a time.")] = 8,
    data: Annotated[
        str | None, typer.Option(help="For ruler/... and longbench/...: folder, or name on the hub.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the tokenizer's chat template.")] = False,
    decoded: Annotated[
        int | None, typer.Option(min=1, help="With --text: tokens of a window that count. [default: 64]")
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(min=1, help="With --text, instead: go on by itself for so many tokens of a window."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="With --generate: draw tokens; the likeliest by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    lowering: Annotated[
        str | None, typer.Option(help="inductor or eager, for methods that compile. [default: eager]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's choice by default.")
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="Of the environment with kvpress (make peers).")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare ways of keeping the KV cache: score, bytes and time of each, on the same prompts."""
    check_folder(json_file)
    check_dtype(dtype)
    tasks, lengths, depths = task or [], length or [1000], depth or []
    if bool(tasks) == (text is not None):
        raise typer.BadParameter("Give either --task NAME or --text FILE.")
    unused = (
        {"--data": data, "--chat": chat, "--depth": depths}
        if text
        else {"--decoded": decoded, "--generate": generate, "--temperature": temperature}
    )
    if given := [name for name, value in unused.items() if value]:
        raise typer.BadParameter(f"{', '.join(given)}: not with {'--text' if text else '--task'}.")
    if generate and decoded:
        raise typer.BadParameter("--decoded: not with --generate.")
    if temperature is not None and not generate:
        raise typer.BadParameter("--temperature: only with --generate.")
    from specache_fx.quiet import quiet

    console = Console()
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, quiet(threads), as_bad_parameter():
        # Inside: importing what they need is what torchao and transformers talk most about.
        from specache_fx.eval.bench import Bench
        from specache_fx.eval.peers import find_python
        from specache_fx.eval.report import results_table
        from specache_fx.eval.request import read_methods
        from specache_fx.eval.run import run_all, task_cells, text_cells
        from specache_fx.provenance import provenance

        bar = progress.add_task("loading", total=None)
        methods = read_methods(method or _METHODS, bits or [], lowering)
        if any(each.name.startswith("press:") for each in methods):
            find_python(None if peers is None else str(peers))
        settings = {
            "model": model,
            "prompts": prompts,
            "seed": seed,
            "batch_size": batch_size,
            "dtype": dtype,
            "data": data,
            "chat": chat,
        }
        with Bench(
            model, device=device, dtype=dtype, peers_python=None if peers is None else str(peers)
        ) as bench:
            if text is None:
                cells = task_cells(
                    bench,
                    tasks,
                    lengths,
                    depths,
                    prompts=prompts,
                    seed=seed,
                    batch_size=batch_size,
                    data=data,
                    chat=chat,
                )
            else:
                settings |= {"text": text}
                settings |= (
                    {"generate": generate, "temperature": temperature}
                    if generate
                    else {"decoded": decoded or 64}
                )
                cells = text_cells(
                    bench,
                    text,
                    lengths,
                    prompts=prompts,
                    seed=seed,
                    batch_size=batch_size,
                    decoded=decoded or 64,
                    new_tokens=generate,
                    temperature=temperature,
                )
            progress.update(bar, total=len(cells) * len(methods) * prompts)
            rows = run_all(
                cells, methods, lambda name, done: progress.update(bar, advance=done, description=name)
            )
            report = provenance(bench.model.device) | {"settings": settings, "rows": rows}
            if bench.peers_versions:
                report["peers"] = bench.peers_versions
    kind = "windows" if text else "prompts"
    if not console.is_terminal:
        console.width = max(console.width, 140)  # nobody reads rows whose columns are cut
    console.print(results_table(f"{model}, {prompts} {kind} each, {dtype}", rows))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
