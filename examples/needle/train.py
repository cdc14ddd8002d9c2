"""Trains the needle model: a two-layer Llama that looks records up in its context.

    python -m specache_fx.examples.needle.train --minutes 15 --out DIR

The curriculum starts with copying (a repeated span in noise), which makes the induction heads, then asks for
records in contexts that double from 64 to 2,048 tokens, each time the running accuracy passes 95%. The
learning rate falls with the clock, so a run ends when it should on any machine; the price is that the same
seed gives the same weights only at the same speed. `--resume DIR` trains a saved model further, at the last stage.
"""

from __future__ import annotations

import copy
import json
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import LlamaConfig, LlamaForCausalLM

from specache_fx.examples.needle import MODEL_DIR, task
from specache_fx.examples.needle.evaluate import EVALUATIONS, evaluate, exact_match
from specache_fx.examples.needle.tokenizer import build_tokenizer

FIRST_LEN, LAST_LEN = 64, 2048
TOKENS_PER_BATCH = 8192
MIN_BATCH, NUM_QUERIES, MAX_RECORDS = 8, 12, 48
PROMOTION_ACCURACY = 0.95


def build_model() -> LlamaForCausalLM:
    """The untrained model: 0.43 million parameters, grouped-query attention, head_dim 64."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=task.VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=16384,
            tie_word_embeddings=False,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            pad_token_id=task.PAD_ID,
            bos_token_id=task.BOS_ID,
            eos_token_id=task.EOS_ID,
        )
    )


@dataclass
class Curriculum:
    """What to train on next. `accuracy` is a running mean over the answer tokens of recent batches."""

    generator: torch.Generator
    retrieval: bool = False
    context_len: int = FIRST_LEN
    accuracy: float = 0.0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels of the next batch, about `TOKENS_PER_BATCH` tokens of context."""
        batch_size = max(MIN_BATCH, TOKENS_PER_BATCH // self.context_len)
        if not self.retrieval:
            return task.copying_batch(batch_size, self.context_len, self.generator)
        length = self.context_len
        # Shorter contexts stay in the mixture, or the model forgets them.
        while length > FIRST_LEN and self._below(10) < 3:
            length //= 2
        most = min(MAX_RECORDS, max(5, length // 16))
        return task.retrieval_batch(
            batch_size, length, 4 + self._below(most - 3), NUM_QUERIES, self.generator
        )

    def update(self, accuracy: float) -> None:
        """Takes one batch's accuracy in, and moves on once the running mean is high enough."""
        self.accuracy = 0.95 * self.accuracy + 0.05 * accuracy
        if self.accuracy <= PROMOTION_ACCURACY:
            return
        if not self.retrieval:
            self.retrieval, self.accuracy = True, 0.0
        elif self.context_len < LAST_LEN:
            self.context_len, self.accuracy = 2 * self.context_len, 0.5

    def __str__(self) -> str:
        return f"{'retrieval' if self.retrieval else 'copying'} at {self.context_len}"

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=self.generator))


def fit(
    model: LlamaForCausalLM, curriculum: Curriculum, seconds: float, peak_lr: float, console: Console
) -> int:
    """Trains in place for so many seconds and returns the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01, betas=(0.9, 0.98))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    start, step, elapsed = time.monotonic(), 0, 0.0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=seconds)
        while elapsed < seconds:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * min(1.0, step / 100) * max(0.05, 1 - elapsed / seconds)
            ids, labels = curriculum.batch()
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            targets = labels[:, 1:]
            answered = targets != task.IGNORE
            # The head runs on the answer positions alone: they are a few per cent of the batch.
            logits = model.lm_head(hidden[answered])
            loss = torch.nn.functional.cross_entropy(logits, targets[answered])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            curriculum.update((logits.argmax(-1) == targets[answered]).float().mean().item())
            elapsed = time.monotonic() - start
            progress.update(bar, completed=elapsed, description=f"{curriculum}")
            if step % 100 == 0:
                quality = f"loss {loss.item():.3f}  token accuracy {curriculum.accuracy:.3f}"
                console.print(f"{elapsed:5.0f} s  step {step:5d}  {curriculum}  {quality}")
    return step


def save(model: LlamaForCausalLM, record: dict[str, Any], out: Path) -> None:
    """Writes the model, its tokenizer, ready for `AutoModelForCausalLM` and `AutoTokenizer`, and the record."""
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def score(model: LlamaForCausalLM, num_prompts: int) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Chooses the dtype to save in, and scores the weights as they will be saved.

    Returns:
        The model to save, and the part of `training.json` that says how good it is.
    """
    # bfloat16 weights halve the file; they are kept unless the rounding alone costs answers.
    hardest = task.make_prompts(num_prompts, *EVALUATIONS[-1], seed=0)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    before, after = (exact_match(candidate, hardest) for candidate in (model, copy.deepcopy(rounded).float()))
    saved = rounded if before - after <= 0.01 else model
    scores = {
        "float32": evaluate(copy.deepcopy(saved).float(), num_prompts, seed=0),
        "bfloat16": evaluate(rounded, num_prompts, seed=0),
    }
    rounding = {"float32_weights": before, "bfloat16_weights": after}
    return saved, {
        "saved_as": str(saved.dtype).removeprefix("torch."),
        "rounding": rounding,
        "scores": scores,
    }


def main(
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 15.0,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")] = MODEL_DIR,
    resume: Annotated[Path | None, typer.Option(help="Folder of a saved model to train further.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 2e-3,
    seed: Annotated[
        int, typer.Option(min=0, max=task.EVALUATION_SEED - 1, help="Seed of weights and data.")
    ] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    prompts: Annotated[int, typer.Option(help="Prompts for each score.")] = 256,
) -> None:
    """Train the needle model, score it in float32 and bfloat16, and save it."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    console = Console(soft_wrap=True)
    curriculum = Curriculum(torch.Generator().manual_seed(seed))
    options = f"--minutes {minutes:g} --seed {seed} --threads {threads} --learning-rate {learning_rate:g}"
    runs = []
    if resume is None:
        model = build_model()
    else:
        model = LlamaForCausalLM.from_pretrained(resume, dtype=torch.float32)
        curriculum.retrieval, curriculum.context_len = True, LAST_LEN
        runs = json.loads((resume / "training.json").read_text(encoding="utf-8"))["runs"]
        options += " --resume DIR"
    console.print(f"{model.num_parameters():,} parameters")
    steps = fit(model.train(), curriculum, 60 * minutes, learning_rate, console)
    run = {"command": f"python -m specache_fx.examples.needle.train {options}", "seed": seed}
    record = {
        "runs": [*runs, {**run, "minutes": minutes, "steps": steps, "stage_reached": str(curriculum)}],
        "device": f"CPU, {platform.machine()}, {threads} threads",
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "parameters": model.num_parameters(),
    }
    # Saved before it is scored as well: scoring takes minutes, and the weights shouldn't depend on its end.
    save(model.eval(), record, out)
    saved, quality = score(model, prompts)
    save(saved, record | quality, out)
    console.print_json(data=record | quality)


if __name__ == "__main__":
    typer.run(main)
