"""The command line: `specache-fx plan`, `explain` and `demo`. The laboratory (benchmarks/) has its own.

Commands import torch and transformers inside, so that `--help` and bad options answer at once.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

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
from specache_fx.cli.sizes import parse_size
from specache_fx.config import POLICIES, SpecacheConfig
from specache_fx.errors import ConfigError

if TYPE_CHECKING:
    from specache_fx.cli.plan import Prompt

_DEFAULTS = SpecacheConfig()

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Speculative low-bit KV caching for PyTorch decoders."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specache-fx {version('specache-fx')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Speculative low-bit KV caching for PyTorch decoders."""


@app.command("plan")
def plan_command(
    layers: Annotated[int | None, Option(min=1, help="Attention layers.")] = None,
    kv_heads: Annotated[int | None, Option(min=1, help="Key/value heads of a layer.")] = None,
    head_dim: Annotated[int | None, Option(min=1, help="Channels of a key and of a value.")] = None,
    model: Annotated[str | None, Option(help="Instead: a transformers model's folder, file or name.")] = None,
    context: Annotated[
        int | None, Option(min=1, help="Of a sequence; the model's longest by default.")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Sequences.")] = 1,
    bits: Annotated[int | None, Option(help="Width of the device copy's codes; all by default.")] = None,
    group_size: Annotated[int, Option(help="Tokens or channels that share a scale.")] = _DEFAULTS.group_size,
    residual_length: Annotated[int, Option(help="Newest tokens at 16 bits.")] = _DEFAULTS.residual_length,
    top_k: Annotated[int, Option(help="KV pairs prefetched for each head.")] = _DEFAULTS.top_k,
    policy: Annotated[str, Option(help=f"One of {', '.join(POLICIES)}.")] = _DEFAULTS.policy,
    quantizer: Annotated[str | None, Option(help="Makes the codes; the policy's by default.")] = None,
    resident_layers: Annotated[
        int, Option(help="First ones, whole on the device.")
    ] = _DEFAULTS.resident_layers,
    sink_tokens: Annotated[int, Option(help="First tokens at 16 bits.")] = _DEFAULTS.sink_tokens,
    dtype: Annotated[str | None, Option(help="The model's: bfloat16 (default), float16 or float32.")] = None,
    budget: Annotated[str | None, Option(help="Device bytes, such as 40GiB: the largest batch.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Plan the bytes of a KV cache on the device and on the host."""
    from specache_fx.cli.plan import plan_rows, plan_table

    check_folder(json_file)
    sizes = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    with as_bad_parameter():
        budget_bytes = None if budget is None else parse_size(budget)
        prompt = _prompt(model, sizes, context, batch, dtype)
        check_dtype(prompt.dtype)
        options = {
            "policy": policy,
            **({} if quantizer is None else {"quantizer": quantizer}),
            "group_size": group_size,
            "residual_length": residual_length,
            "top_k": top_k,
            "resident_layers": resident_layers,
            "sink_tokens": sink_tokens,
        }
        rows = plan_rows(prompt, options, None if bits is None else [bits], budget_bytes)
    Console().print(plan_table(prompt, options, rows, budget_bytes))
    settings = {**prompt.to_json(), "budget_bytes": budget_bytes}
    write_json(json_file, {"settings": settings, "options": options, "rows": rows})


def _prompt(
    model: str | None, sizes: dict[str, Any], context: int | None, batch: int, dtype: str | None
) -> Prompt:
    """The prompt whose cache is planned, of the sizes that are given, or of a transformers model's.

    Raises:
        ConfigError: If a size is missing or given twice.
    """
    from specache_fx.cli.plan import Prompt
    from specache_fx.cli.quiet import quiet
    from specache_fx.runtime.layers.layout import LayerShape

    needed = {**({} if model else sizes), "--context": context}
    if model is not None:
        if any(size is not None for size in sizes.values()):
            raise ConfigError("--model brings --layers, --kv-heads and --head-dim: give one or the others.")
        with quiet():
            from specache_fx.cli.cache_shapes import cache_shapes, load_config

            config = load_config(model)
            shapes, own_dtype = cache_shapes(config)
        dtype = dtype or own_dtype
        text = config.get_text_config(decoder=True)
        needed["--context"] = context or getattr(text, "max_position_embeddings", None)
    if missing := [name for name, size in needed.items() if size is None]:
        raise ConfigError(f"{', '.join(missing)} missing: give them, or --model with a transformers model.")
    if model is None:
        layers, heads, width = sizes.values()
        shapes = [LayerShape(heads, width, width)] * layers
    return Prompt(shapes, needed["--context"], batch, dtype or Prompt.dtype)


@app.command("explain")
def explain_command(
    model: Annotated[
        str, typer.Argument(help="A transformers model's folder or name: its config is enough.")
    ],
    layers: Annotated[int, Option(min=1, help="First layers of it, with random weights.")] = 2,
    tokens: Annotated[int, Option(min=2, help="Of the prompt that is traced.")] = 16,
) -> None:
    """Say what becomes of a model's attention, and why, by running its first layers once."""
    from specache_fx.cli.quiet import quiet

    with quiet(), as_bad_parameter():
        import torch
        from transformers import AutoModelForCausalLM

        from specache_fx.cli.cache_shapes import load_config
        from specache_fx.report.explanation import explain

        config = load_config(model)
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers = min(layers, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        made = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.arange(tokens)[None] % text.vocab_size
        with torch.no_grad():
            said = str(explain(made, input_ids=ids, min_new_tokens=4))  # random weights may end at once
    typer.echo(said)


@app.command("demo")
def demo_command(
    prompts: Annotated[int, Option(min=1, help="Unseen prompts for each method.")] = 100,
    context: Annotated[int, Option(min=8, help="Tokens of each prompt.")] = 2000,
    records: Annotated[int, Option(min=1, help="Records hidden in each prompt.")] = 48,
    seed: Annotated[int, Option(min=0, help="Of the prompts.")] = 0,
    batch_size: Annotated[int, Option(min=1, help="Prompts at a time.")] = 10,
    dtype: Dtype = "bfloat16",
    lowering: Annotated[str, Option(help="inductor, or eager: no compile time.")] = "inductor",
    threads: Threads = None,
    model: Annotated[
        Path | None, Option(help="Folder of the needle model; the trained one by default.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Ask a trained model about records in long prompts, with the full KV cache, KIVI's and SpeCache's."""
    check_folder(json_file)
    check_dtype(dtype)
    with as_bad_parameter():
        SpecacheConfig.from_options({"lowering": lowering})
    console = Console()
    with progress_bar(console, threads) as progress:
        # Inside: torchao and transformers print most of their notices while their imports run.
        from specache_fx.cli.demo import METHODS, DemoSettings, demo_json, demo_table, run_demo
        from specache_fx.examples.needle import MODEL_DIR

        settings = DemoSettings(
            str(model or MODEL_DIR), prompts, context, records, seed, batch_size, dtype, lowering
        )
        task = progress.add_task("loading", total=len(METHODS) * prompts)

        def on_batch(method: str, done: int) -> None:
            first = "" if done or METHODS[method] is None else ": compiling"
            progress.update(task, advance=done, description=method + first)

        rows = run_demo(settings, on_batch)
    console.print(demo_table(settings, rows))
    write_json(json_file, demo_json(settings, rows, threads))
