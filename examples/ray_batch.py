"""Many prompts, many processes: each Ray actor has a compiled model, and takes prompts in batches.

    pip install 'ray[data]'
    python -m specache_fx.examples.ray_batch answers --actors 2
    python -m specache_fx.examples.ray_batch answers --model FOLDER --prompts FILE.jsonl --gpus-per-actor 1

A line of the prompts' file is a JSON object with "prompt"; results are the same objects with "answer" too, as JSON
lines in the folder `answers`. Without a file the prompts are those of the needle task, and the score is shown.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specache_fx
from specache_fx.examples.needle import MODEL_DIR, make_prompts, to_text


class Answer:
    """An actor: it loads and compiles the model once."""

    def __init__(self, model: str, new_tokens: int, options: dict[str, Any], threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.new_tokens = new_tokens
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device).eval()
        specache_fx.compile(self.model, **options)

    @torch.inference_mode()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add "answer" to a batch of rows."""
        prompts = self.tokenizer(list(batch["prompt"]), return_tensors="pt", padding=True)
        prompts = prompts.to(self.model.device)
        out = self.model.generate(**prompts, max_new_tokens=self.new_tokens, do_sample=False)
        new = out[:, prompts.input_ids.shape[1] :]
        return {**batch, "answer": self.tokenizer.batch_decode(new, skip_special_tokens=True)}


def needle_rows(num_prompts: int) -> list[dict[str, str]]:
    """Prompts of 500 tokens that ask for one of 12 records, with the record."""
    prompts = make_prompts(num_prompts, 500, 12, seed=0)
    pairs = zip(prompts.input_ids, prompts.answers, strict=True)
    return [{"prompt": to_text(ids), "expected": to_text(answer)} for ids, answer in pairs]


def main() -> None:
    """Answer all prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", type=Path, help="folder of the results; it must not exist")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of a transformers model")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt`")
    parser.add_argument("--actors", type=int, default=1, help="models at a time")
    parser.add_argument("--gpus-per-actor", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument(
        "--lowering", choices=["inductor", "eager"], default="inductor", help="eager: no compile time"
    )
    args = parser.parse_args()
    if args.answers.exists():
        parser.error(f"{args.answers} exists already: name another folder")
    try:
        import ray
    except ModuleNotFoundError:
        parser.error("Ray is not installed: pip install 'ray[data]'")

    ray.init(include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_json(str(args.prompts)) if args.prompts else ray.data.from_items(needle_rows(32))
    options = {"bits": args.bits, "lowering": args.lowering}
    threads = 0 if args.gpus_per_actor else max(1, (os.cpu_count() or 1) // args.actors)
    answered = rows.map_batches(
        Answer,
        fn_constructor_args=(str(args.model), args.new_tokens, options, threads),
        batch_size=args.batch_size,
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_cpus=1,
        num_gpus=args.gpus_per_actor,
    ).materialize()
    answered.write_json(str(args.answers))
    print(f"{answered.count()} prompts answered in {args.answers}")
    if not args.prompts:
        right = sum(row["answer"].strip() == row["expected"].strip() for row in answered.take_all())
        print(f"{right} of them right")


if __name__ == "__main__":
    main()
