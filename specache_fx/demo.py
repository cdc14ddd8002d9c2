"""The demo: a trained model, long prompts, and each KV cache's score and bytes.

Every row runs the same model on the same prompts through the public way: `model.compile(backend="specache")`, then
`model.generate(...)`. The first row is transformers' own cache, uncompiled.

Paper: SpeCache §4.1 (KIVI with 128 residual tokens; SpeCache with 64 and 64 prefetched, for equal memory), Table 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import specache_fx
from specache_fx.compiled import uncompile
from specache_fx.demo_report import BatchResult, DemoRow, DemoSettings
from specache_fx.errors import ConfigError
from specache_fx.examples.needle.task import ANSWER_LEN, Prompts, make_prompts

_KIVI = {"policy": "kivi", "group_size": 64, "residual_length": 128}
_SPECACHE = {"policy": "specache", "group_size": 64, "residual_length": 64, "top_k": 64}

# None: the full cache of transformers, uncompiled.
METHODS: dict[str, dict[str, Any] | None] = {
    "full cache": None,
    "KIVI 2-bit": {**_KIVI, "bits": 2},
    "KIVI 1-bit": {**_KIVI, "bits": 1},
    "SpeCache 2-bit": {**_SPECACHE, "bits": 2},
    "SpeCache 1-bit": {**_SPECACHE, "bits": 1},
    "SpeCache 2-bit, token": {**_SPECACHE, "bits": 2, "lookahead": "token"},
    "SpeCache 1-bit, token": {**_SPECACHE, "bits": 1, "lookahead": "token"},
}


def load_model(settings: DemoSettings) -> PreTrainedModel:
    """Load the demo's model.

    Raises:
        ConfigError: If there is none in that folder.
    """
    if not (Path(settings.model) / "config.json").is_file():
        raise ConfigError(
            f"There is no model in {settings.model!r}. The trained one is in examples/needle/model of the repository;"
            " `python -m specache_fx.examples.needle.train` trains it anew. Give its folder with --model."
        )
    return AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype)).eval()


def run_demo(
    settings: DemoSettings, on_batch: Callable[[str, int], None] = lambda method, batch: None
) -> list[DemoRow]:
    """Run every method on the same prompts.

    Args:
        settings: Prompts, lengths and device.
        on_batch: Called with the method's name before its first batch (0 prompts done) and after each batch.

    Raises:
        ConfigError: If the model or the prompts can't be had.
    """
    try:
        prompts = make_prompts(settings.prompts, settings.context, settings.records, settings.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model = load_model(settings)
    rows = []
    for method, options in METHODS.items():
        on_batch(method, 0)
        options_used = {} if options is None else {**options, "lowering": settings.lowering}
        if options_used:
            model.compile(backend="specache", options=options_used)
        began = time.perf_counter()
        results = []
        try:
            for result in _answer(model, prompts, settings.batch_size):
                results.append(result)
                on_batch(method, result.prompts)
        finally:
            uncompile(model)
        rows.append(DemoRow.of(method, options_used, results, time.perf_counter() - began))
    return rows


def _answer(model: PreTrainedModel, prompts: Prompts, batch_size: int) -> Iterator[BatchResult]:
    for input_ids, answers in zip(
        prompts.input_ids.split(batch_size), prompts.answers.split(batch_size), strict=True
    ):
        out = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=ANSWER_LEN,
            min_new_tokens=ANSWER_LEN,  # all answers are this long: an early end would only skip decode steps
            do_sample=False,
            return_dict_in_generate=True,
        )
        correct = int((out.sequences[:, input_ids.shape[1] :] == answers).all(dim=1).sum())
        cache = out.past_key_values
        stats = None if model._compiled_call_impl is None else specache_fx.stats(cache)
        device_bytes = (
            stats.device_bytes if stats else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        )
        yield BatchResult(len(input_ids), correct, device_bytes, stats)
