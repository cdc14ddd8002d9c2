"""A long document is read once and asked about in later processes.

    python -m specache_fx.examples.ask_again STORE "| key07"      # reads it, then answers
    python -m specache_fx.examples.ask_again STORE "| key12"      # loads what was read

The first call of a process also makes the model's graphs, which takes seconds for a large model.

The document is 2,000 tokens of the needle task by default; `--model FOLDER --document FILE` takes another one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specache_fx
from specache_fx.examples.needle import MODEL_DIR, make_prompts, to_text

STORE_BYTES = 4 << 30


def needle_document() -> str:
    """48 records in 2,000 tokens, always the same."""
    return to_text(make_prompts(1, 2000, 48, seed=0).input_ids[0, :-2])


@torch.inference_mode()
def main() -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path, help="folder of the saved caches")
    parser.add_argument("question", help="what comes behind the document")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of a transformers model")
    parser.add_argument("--document", type=Path, help="text file")
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument(
        "--lowering", choices=["inductor", "eager"], default="inductor", help="eager: no compile time"
    )
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    specache_fx.compile(model, bits=2, lowering=args.lowering)
    store = specache_fx.PrefixStore(args.store, max_bytes=STORE_BYTES)

    text = args.document.read_text() if args.document else needle_document()
    document = tokenizer(text, return_tensors="pt").input_ids
    question = tokenizer(args.question, return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat(
        [document, question], dim=1
    )  # joined as tokens: the document's are the same in each prompt

    begun = time.perf_counter()
    cache, num_tokens = store.get(model, ids)
    if num_tokens < document.shape[1]:
        rest = document[:, num_tokens:]
        cache = model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        store.put(document, cache)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=args.new_tokens, do_sample=False)
    print(tokenizer.decode(out[0, ids.shape[1] :]))
    print(f"{num_tokens:,} of {ids.shape[1]:,} tokens were loaded; {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
