"""`specache-fx bench attention` and `specache-fx bench decode`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specache_fx.cli_common import JsonFile, as_bad_parameter, check_dtype, check_folder
from specache_fx.config import BITS
from specache_fx.errors import ConfigError

bench_app = typer.Typer(
    no_args_is_help=True, help="Time attention and decode steps, beside what others offer."
)

Widths = Annotated[list[int] | None, typer.Option("--bits", help="Widths of our codes; 2 and 1 by default.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice by default.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; cuda where there is one by default.")]
PngFile = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw them there.")]


def _prepare(
    widths: list[int] | None,
    dtype: str,
    heads: tuple[int, int],
    json_file: Path | None,
    png_file: Path | None,
) -> list[int]:
    """Widths of our codes; complains about what both commands are given."""
    from specache_fx.bench.report import check_plot

    check_dtype(dtype)
    if unknown := set(widths or ()) - set(BITS):
        raise ConfigError(f"--bits {min(unknown)}: choose one of {', '.join(map(str, BITS))}.")
    if heads[0] % heads[1]:
        raise ConfigError(f"--heads {heads[0]} is no multiple of --kv-heads {heads[1]}.")
    check_folder(json_file)
    check_plot(png_file)
    return widths or [2, 1]


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: give cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no GPU here. Use --device cpu.")
    return device


def _peers(device: Any, dtype: str) -> tuple[str, ...]:
    """Their names, where they can run."""
    from specache_fx.bench.cpu_peers import PEERS, find_python

    if device.type != "cpu":
        raise ConfigError(f"--peers run on the CPU, and --device is {device.type}: leave one of them out.")
    if dtype == "float16":
        raise ConfigError("--peers run in float32 or bfloat16, and --dtype is float16.")
    find_python()
    return tuple(PEERS)


def _write(
    file: Path | None, origin: dict[str, Any], settings: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    if file is not None:
        report = {**origin, "settings": settings, "results": results}
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _progress(console: Console) -> Progress:
    return Progress(TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn(), console=console)


@bench_app.command("attention")
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
    dtype: Annotated[str, typer.Option(help="Of our cache: bfloat16, float16 or float32.")] = "bfloat16",
    kernel: Annotated[str, typer.Option(help="See SpecacheConfig.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each, in turn.")] = 30,
    threads: Threads = None,
    device: Device = "auto",
    json_file: JsonFile = None,
    png_file: PngFile = None,
) -> None:
    """Time one layer's attention over a whole cache."""
    console, results, lengths = Console(), [], kv_len or [32768]
    with as_bad_parameter():
        widths = _prepare(bits, dtype, (heads, kv_heads), json_file, png_file)
        import torch

        from specache_fx.bench.attention import AttentionShape, bench_attention
        from specache_fx.bench.report import attention_table, plot_bars
        from specache_fx.provenance import provenance
        from specache_fx.quiet import quiet

        with _progress(console) as progress, quiet(threads):
            where = _device(device)
            origin = provenance(where)
            task = progress.add_task("attention", total=len(lengths) * rounds)
            for length in lengths:
                shape = AttentionShape(batch, heads, kv_heads, head_dim, length)
                progress.update(task, description=f"attention, {length:,} tokens")
                results.append(
                    bench_attention(
                        shape, widths, quantizer or ["turboquant", "kivi"], lanes, getattr(torch, dtype), kernel,
                        rounds, where, lambda: progress.advance(task),
                    )
                )  # fmt: skip
    for result in results:
        console.print(attention_table(result, "sdpa float32"))
    _write(json_file, origin, {"rounds": rounds}, results)
    if png_file is not None:
        plot_bars(png_file, results, [f"one layer's attention, {length:,} tokens" for length in lengths])


@bench_app.command("decode")
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
        bool, typer.Option("--int8", help="Weights of linear layers in int8, by torchao; no peers.")
    ] = False,
    bits: Widths = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each method.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a turn.")] = 8,
    threads: Threads = None,
    device: Device = "auto",
    json_file: JsonFile = None,
    png_file: PngFile = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="OpenVINO and llama.cpp too, on the CPU, after `make peers-cpu`.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write some steps there, of the last case, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Time whole decode steps, for each batch and context."""
    console, results = Console(), []
    with as_bad_parameter():
        widths = _prepare(bits, dtype, (heads, kv_heads), json_file, png_file)
        check_folder(trace, "--trace")
        if int8 and peers:
            raise ConfigError("--int8 has no --peers: their weights would be others. Leave one of them out.")
        if int8 and find_spec("torchao") is None:
            raise ConfigError("--int8 needs torchao. Install it with `pip install torchao`.")
        import torch

        from specache_fx.bench.decode import ModelSize, bench_decode, check_options, methods
        from specache_fx.bench.report import decode_tables, plot_bars
        from specache_fx.provenance import provenance
        from specache_fx.quiet import quiet

        with _progress(console) as progress, quiet(threads):
            where, chosen = _device(device), methods(widths)
            others = _peers(where, dtype) if peers else ()
            origin = provenance(where)  # the commit from before a trace is written
            check_options(chosen)
            size = ModelSize(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, int8)
            cases = [(b, length) for length in context or [256, 16384] for b in batch or [1]]
            task = progress.add_task("building", total=len(cases) * (len(chosen) + len(others) + rounds))
            for sequences, length in cases:

                def on_method(name: str, at: str = f"{length:,} x {sequences}") -> None:
                    progress.update(task, advance=1, description=f"{at}: {name}")

                made = bench_decode(
                    size, sequences, length, chosen, getattr(torch, dtype), rounds, steps, where, on_method,
                    trace if (sequences, length) == cases[-1] else None, others,
                )  # fmt: skip
                results.append(made)
            named = {name: method.to_json() for name, method in chosen.items()}
            settings = {"rounds": rounds, "steps": steps, "methods": named}
            _write(json_file, origin, settings, results)
    for result in results:
        console.print(*decode_tables(result, "transformers"))
    if png_file is not None:
        plot_bars(png_file, results, [f"decode step, {length:,} tokens, batch {b}" for b, length in cases])
