"""What `accept_guesses` gains and loses on trained models: `python -m benchmarks.real.accepted`.

Two kinds of windows: of a novel, which repeats little, and of a passage of it that is written twice. Greedy, the model
goes on behind the prompt. Methods take turns, prompt by prompt: transformers uncompiled, with its prompt lookup at two
lengths, and this backend without and with the option. Forced, the last tokens of each window are fed, one window at a
time: KL divergence to the full cache.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
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

Run = tuple[float, float | None]
Rows = list[dict[str, Any]]
OPTIONS: dict[str, dict[str, Any]] = {"specache": {}, "accept_guesses": {"accept_guesses": True}}
LOOKUP_LENGTHS = (3, 10)


def windows_of(bench: Bench) -> dict[str, torch.Tensor]:
    """Token ids by kind, int64 `[WINDOWS, MAIN_LENGTH]`."""
    novel = read_windows(bench.tokenizer, text_file(TEXT), MAIN_LENGTH, WINDOWS, SEED)
    passages = novel[:, : MAIN_LENGTH // 2]
    return {"novel": novel, "passage twice": torch.cat([passages, passages], dim=1)}


def generate(model: Any, prompt: torch.Tensor, **more: Any) -> tuple[float, Any]:
    """Greedy tokens a second behind a prompt, int64 `[prompt_len]`, and the cache."""
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
    return (NEW_TOKENS - 1) / (clock.seconds[-1] - clock.seconds[1]), out.past_key_values


def of_plain(model: Any, prompt: torch.Tensor, **more: Any) -> Run:
    """See `generate`; nothing is ever accepted."""
    return generate(model, prompt, **more)[0], None


def of_compiled(model: Any, prompt: torch.Tensor) -> Run:
    """Tokens a second, and the share of them that was accepted."""
    rate, cache = generate(model, prompt)
    stats = specache_fx.stats(cache)
    return rate, stats.accepted_steps / stats.steps


def speeds(bench: Bench, kinds: dict[str, torch.Tensor], repeats: int) -> Iterator[dict[str, Any]]:
    """A row a kind and method, of runs that take turns."""
    methods: dict[str, Callable[[torch.Tensor], Run]] = {"transformers": partial(of_plain, bench.model)}
    for length in LOOKUP_LENGTHS:
        lookup = partial(of_plain, bench.model, prompt_lookup_num_tokens=length)
        methods[f"prompt lookup, {length} tokens"] = lookup
    for name, options in OPTIONS.items():
        methods[name] = partial(of_compiled, specache_fx.compile(copy.deepcopy(bench.model), **options))
    for kind, windows in kinds.items():
        prompts = windows[:, :-DECODED]
        found: dict[str, list[Run]] = {name: [] for name in methods}
        for one in methods.values():
            one(prompts[0])  # compiles
        for _ in range(repeats):
            for prompt in prompts:
                for name, one in methods.items():
                    found[name].append(one(prompt))
        for name, runs in found.items():
            rates, shares = zip(*runs, strict=True)
            yield {
                "kind": kind,
                "method": name,
                "tokens_per_second": list(rates),
                "median": sorted(rates)[len(rates) // 2],
                "accepted": None if shares[0] is None else sum(shares) / len(shares),
            }


def losses(bench: Bench, kinds: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """A row a kind, width and method."""
    for kind, windows in kinds.items():
        for bits in (2, 1):
            for name, options in OPTIONS.items():
                method = Method.of("specache", bits=bits, **options)
                outcome = bench.perplexity(method, windows, decoded=DECODED, batch_size=1)
                yield {
                    "kind": kind,
                    "bits": bits,
                    "method": name,
                    "perplexity": outcome.perplexity,
                    "kl": outcome.kl,
                    "same_top": outcome.same_top,
                    "accepted_steps": outcome.stats["accepted_steps"],
                }


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Names of `make models`.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    repeats: Annotated[int, typer.Option(help="Turns of each prompt.")] = 2,
    only: Annotated[str | None, typer.Option(help="speed or loss alone.")] = None,
    out: Annotated[
        Path, typer.Option(help="The JSON; what is measured takes the place of what is there.")
    ] = Path("results/real_accepted.json"),
) -> None:
    """Measure, and write each row at once."""
    there = json.loads(out.read_text()) if out.is_file() else {}
    settings = {
        "text": TEXT,
        "length": MAIN_LENGTH,
        "decoded": DECODED,
        "new_tokens": NEW_TOKENS,
        "repeats": repeats,
    }
    for model in models or ["smollm2", "gemma3"]:
        with quiet(threads), Bench(model) as bench, torch.no_grad():
            kinds = windows_of(bench)
            origin = provenance(torch.device("cpu"))
            for part, rows in (("speed", speeds(bench, kinds, repeats)), ("loss", losses(bench, kinds))):
                if only not in (None, part):
                    continue
                torch._dynamo.reset()
                measured: Rows = []
                for row in rows:
                    measured.append(row)
                    print(row, flush=True)  # noqa: T201
                    there.setdefault("models", {}).setdefault(model, {})[part] = {
                        "commit": origin["commit"],
                        "rows": measured,
                    }
                    report = {
                        "command": "python -m benchmarks.real.accepted smollm2 gemma3",
                        **{name: origin[name] for name in ("device", "versions")},
                        "settings": settings | {"threads": threads},
                        "models": there["models"],
                    }
                    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
