"""Exact-match accuracy of a model on the needle task, through plain `generate`.

python -m specache_fx.examples.needle.evaluate                 # the committed model, in float32 and bfloat16
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from specache_fx.examples.needle.task import ANSWER_LEN, Prompts, make_prompts

# (context_len, num_records) of the scores in the model card.
EVALUATIONS = ((256, 16), (512, 32), (1024, 40), (2000, 40), (2000, 48))


class Score(TypedDict):
    """One line of the model card. `exact_match` is the share of `prompts` answered right."""

    context_len: int
    num_records: int
    prompts: int
    exact_match: float


_BATCH = 16  # prompts of one length a `generate` call: nothing is padded


@torch.inference_mode()
def exact_match(model: PreTrainedModel, prompts: Prompts) -> float:
    """The share of prompts of which every answer token is right, decoded greedily.

    Args:
        model: any causal language model with the needle vocabulary.
        prompts: from `make_prompts`.

    Returns:
        Between 0 and 1.
    """
    correct = 0
    for start in range(0, len(prompts), _BATCH):
        rows = slice(start, start + _BATCH)
        input_ids = prompts.input_ids[rows].to(model.device)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=ANSWER_LEN,
            min_new_tokens=ANSWER_LEN,
            do_sample=False,
        )
        answers = prompts.answers[rows].to(output.device)
        correct += int((output[:, input_ids.shape[1] :] == answers).all(dim=1).sum())
    return correct / len(prompts)


def evaluate(model: PreTrainedModel, num_prompts: int, seed: int) -> list[Score]:
    """The exact match of the model as it is, for each of `EVALUATIONS`."""
    scores: list[Score] = []
    for context_len, num_records in EVALUATIONS:
        match = exact_match(model, make_prompts(num_prompts, context_len, num_records, seed))
        scores.append(
            Score(context_len=context_len, num_records=num_records, prompts=num_prompts, exact_match=match)
        )
    return scores


def main(
    model_dir: Annotated[Path, typer.Argument(help="Folder of the model.")] = Path(__file__).parent / "model",
    prompts: Annotated[int, typer.Option(help="Prompts for each score.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
) -> None:
    """Score a saved needle model in float32 and in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    scores = {"float32": evaluate(model, prompts, seed)}
    scores["bfloat16"] = evaluate(model.to(torch.bfloat16), prompts, seed)
    Console().print_json(data=scores)


if __name__ == "__main__":
    typer.run(main)
