"""A small retrieval model that was trained for this project, and its task.

prompts = make_prompts(num_prompts=8, context_len=2000, num_records=40, seed=0)
model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
exact_match(model, prompts)
"""

from __future__ import annotations

from pathlib import Path

from specache_fx.examples.needle.evaluate import exact_match
from specache_fx.examples.needle.task import Prompts, make_prompts, to_text
from specache_fx.examples.needle.tokenizer import build_tokenizer

MODEL_DIR = Path(__file__).parent / "model"

__all__ = ["MODEL_DIR", "Prompts", "build_tokenizer", "exact_match", "make_prompts", "to_text"]
