"""What `accept_guesses` gains and loses on trained models: `python -m benchmarks.real.accepted`.

Two kinds of windows: of a novel, which repeats little, and of a passage of it that is written twice. Greedy, the model
goes on behind the prompt. Methods take turns, prompt by prompt: transformers uncompiled, with its prompt lookup at two
lengths, and this backend without and with the option. Forced, the last tokens of each window are fed, one window at a
time: KL divergence to the full cache.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import specache_fx
from benchmarks.real.first_call import Clock
from benchmarks.real.runs import DECODED, MAIN_LENGTH, NEW_TOKENS, SEED, TEXT, WINDOWS
from specache_fx.eval.bench import Bench, Method
from specache_fx.eval.real import text_file
from specache_fx.eval.text import read_windows
from specache_fx.provenance import provenance
from specache_fx.quiet import quiet

Generate = Callable[[torch.Tensor], tuple[float, float | None]]
OPTIONS: dict[str, dict[str, Any]] = {"specache": {}, "accept_guesses": {"accept_guesses": True}}
LOOKUP_LENGTHS = (3, 10)


def windows_of(bench: Bench) -> dict[str, torch.Tensor]:
    """Token ids by kind, int64 `[WINDOWS, MAIN_LENGTH]`."""
    novel = read_windows(bench.tokenizer, text_file(TEXT), MAIN_LENGTH, WINDOWS, SEED)
    passages = novel[:, : MAIN_LENGTH // 2]
    return {"novel": novel, "passage twice": torch.cat([passages, passages], dim=1)}


def generate(model: Any, prompt: torch.Tensor, **more: Any) -> tuple[float, float | None]:
    """Greedy tokens a second behind a prompt, int64 `[prompt_len]`, and the share that was accepted."""
    clock = Clock()
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        streamer=clock,
        **more,
    )
    rate = (NEW_TOKENS - 1) / (clock.seconds[-1] - clock.seconds[1])
    try:
        stats = specache_fx.stats(out.past_key_values)
    except specache_fx.CacheHandleError:
        return rate, None
    return rate, stats.accepted_steps / stats.steps


def speeds(bench: Bench, kinds: dict[str, torch.Tensor], repeats: int) -> list[dict[str, Any]]:
    """A row a kind and method, of runs that take turns."""
    plain = bench.model
    methods: dict[str, Generate] = {"transformers": lambda prompt: generate(plain, prompt)}
    for length in LOOKUP_LENGTHS:
        methods[f"prompt lookup, {length} tokens"] = lambda prompt, length=length: generate(  # type: ignore[misc]
            plain, prompt, prompt_lookup_num_tokens=length
        )
    for name, options in OPTIONS.items():
        compiled = copy.deepcopy(plain)
        specache_fx.compile(compiled, **options)
        methods[name] = lambda prompt, compiled=compiled: generate(compiled, prompt)  # type: ignore[misc]
    rows = []
    for kind, windows in kinds.items():
        prompts = windows[:, :-DECODED]
        found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in methods}
        for one in methods.values():
            one(prompts[0])  # compiles
        for _ in range(repeats):
            for prompt in prompts:
                for name, one in methods.items():
                    found[name].append(one(prompt))
        for name, runs in found.items():
            accepted = [share for _, share in runs if share is not None]
            row = {"kind": kind, "method": name, "tokens_per_second": [rate for rate, _ in runs]}
            row["median"] = sorted(row["tokens_per_second"])[len(runs) // 2]
            row["accepted"] = sum(accepted) / len(accepted) if accepted else None
            rows.append(row)
            print(row, flush=True)  # noqa: T201
    return rows


def losses(bench: Bench, kinds: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """A row a kind, width and method."""
    rows = []
    for kind, windows in kinds.items():
        for bits in (2, 1):
            for name, options in OPTIONS.items():
                method = Method.of("specache", bits=bits, **options)
                outcome = bench.perplexity(method, windows, decoded=DECODED, batch_size=1)
                row = {"kind": kind, "bits": bits, "method": name, "perplexity": outcome.perplexity}
                row |= {
                    "kl": outcome.kl,
                    "same_top": outcome.same_top,
                    "accepted_steps": outcome.stats["accepted_steps"],
                }
                rows.append(row)
                print(row, flush=True)  # noqa: T201
    return rows


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Names of `make models`.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    repeats: Annotated[int, typer.Option(help="Turns of each prompt.")] = 2,
    out: Annotated[Path, typer.Option(help="The JSON.")] = Path("results/real_accepted.json"),
) -> None:
    """Measure, and write one JSON."""
    found = {}
    report = provenance(torch.device("cpu"))
    for model in models or ["smollm2", "gemma3"]:
        with quiet(threads), Bench(model) as bench, torch.no_grad():
            kinds = windows_of(bench)
            speed = speeds(bench, kinds, repeats)
            torch._dynamo.reset()
            found[model] = {"speed": speed, "loss": losses(bench, kinds)}
    report |= {
        "command": " ".join(["python -m benchmarks.real.accepted", *(models or [])]),
        "settings": {
            "text": TEXT,
            "length": MAIN_LENGTH,
            "decoded": DECODED,
            "new_tokens": NEW_TOKENS,
            "threads": threads,
            "repeats": repeats,
        },
        "models": found,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
