"""What could follow a miss, beside what is built, on a dense model: `python -m benchmarks.real.candidates`.

Forced text; KL divergence to the full cache, as in `benchmarks.real`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.real.rules import RULES
from benchmarks.real.runs import LENGTHS, MAIN_LENGTH, SEED, TEXT
from benchmarks.real.simulated import Counts, Simulated
from specache_fx.config import SpecacheConfig
from specache_fx.eval.bench import Bench
from specache_fx.eval.real import text_file
from specache_fx.eval.text import read_windows
from specache_fx.provenance import provenance
from specache_fx.quiet import quiet


def simulate(model: str, bits: int, windows: int, decoded: int) -> list[dict[str, Any]]:
    """All rules on windows of the text."""
    with Bench(model) as bench:
        texts = read_windows(bench.tokenizer, text_file(TEXT), MAIN_LENGTH, windows, SEED)
        config = SpecacheConfig(bits=bits)
        totals = {name: Counts() for name in RULES}
        for text in texts:
            prompt, forced = text[None, :-decoded], text[-decoded:].tolist()
            full = Simulated(bench.model, config, None)
            full.prefill(prompt)
            read = Simulated(bench.model, config, RULES["keep"])
            read.prefill(prompt)
            truth = [torch.log_softmax(full.step(token), -1) for token in forced]
            for name, rule in RULES.items():
                run = read.fork(rule)
                run.counts = totals[name]
                run.counts.steps = 0
                for token, wanted in zip(forced, truth, strict=True):
                    got = torch.log_softmax(run.step(token), -1)
                    totals[name].kls.append(float((wanted.exp() * (wanted - got)).sum()))
                print(model, bits, name, sum(totals[name].kls) / len(totals[name].kls), flush=True)  # noqa: T201
    steps = windows * decoded
    return [
        {
            "model": model,
            "bits": bits,
            "rule": name,
            "kl": sum(counts.kls) / len(counts.kls),
            "token_right": counts.right / steps if RULES[name].lanes > 1 else None,
            "attention_captured": counts.captured / counts.wanted,
            "more_passes": counts.more_passes / steps,
            "pairs_fetched_in_step": counts.fetched_in_step / steps,
            "heads_again": counts.heads_again / counts.heads if RULES[name].cosine is not None else None,
        }
        for name, counts in totals.items()
    ]


def main(
    windows: Annotated[int, typer.Option(help="Windows of 2,048 tokens.")] = 1,
    decoded: Annotated[int, typer.Option(help="Of each, tokens that are decoded.")] = 64,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[Path, typer.Option(help="The JSON.")] = Path("results/real_candidates.json"),
) -> None:
    """Measure, and write one JSON."""
    made = provenance(torch.device("cpu"))  # the commit from before the file changes
    made["command"] = f"python -m benchmarks.real.candidates --windows {windows} --decoded {decoded}"
    made["settings"] = {"text": TEXT, "length": MAIN_LENGTH, "windows": windows, "decoded": decoded}
    rows: list[dict[str, Any]] = []
    with quiet(threads):
        for model in LENGTHS:
            for bits in (2, 1):
                rows += simulate(model, bits, windows, decoded)
                out.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
