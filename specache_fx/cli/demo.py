"""The demo: a trained model, long prompts, and each KV cache's score and bytes, as a table and as JSON.

Every row runs the same model on the same prompts through the public way: `model.compile(backend="specache")`, then
`model.generate(...)`. The first row is transformers' own cache, uncompiled.

Paper: SpeCache §4.1 (KIVI with 128 residual tokens; SpeCache with 64 and 64 prefetched, for equal memory), Table 1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

import specache_fx
from specache_fx.cli.provenance import provenance
from specache_fx.cli.sizes import format_size
from specache_fx.compiled import uncompile
from specache_fx.errors import ConfigError
from specache_fx.examples.needle.task import ANSWER_LEN, make_prompts

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


# Of one `generate` call: fields of a `DemoRow`, for one prompt.
Numbers = dict[str, float | None]


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo; see `specache-fx demo --help`."""

    model: str
    prompts: int
    context: int
    records: int
    seed: int
    batch_size: int
    dtype: str
    lowering: str


@dataclass(frozen=True)
class DemoRow:
    """One line of the table. Bytes are of one sequence; None where the method has no such thing.

    Attributes:
        method: A name in `METHODS`.
        exact_match: Share of prompts of which every answer token is right.
        device_bytes: Of the KV cache at the end, counted on its tensors.
        ratio: `device_bytes` to the full cache of the same length: the paper's "KV Cache Size".
        host_bytes: Reserved on the host.
        exact_hit_rate: Share of speculative tokens that were the next token.
        topk_hit_rate: Share of the pairs wanted that had been prefetched.
        prefetched_bytes_per_step: Brought to the device for each decoded token.
        seconds: For all prompts, compiling included.
        options: Given to `model.compile`; empty for the full cache.
    """

    method: str
    exact_match: float
    device_bytes: float
    ratio: float
    host_bytes: float | None
    exact_hit_rate: float | None
    topk_hit_rate: float | None
    prefetched_bytes_per_step: float | None
    seconds: float
    options: dict[str, Any]


_NUMBERS = tuple(field.name for field in fields(DemoRow))[1:-2]  # but for method, seconds and options


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
        batches: list[tuple[int, Numbers]] = []
        try:
            sides = (side.split(settings.batch_size) for side in (prompts.input_ids, prompts.answers))
            for ids, answers in zip(*sides, strict=True):
                batches.append((len(ids), _answer(model, ids, answers)))
                on_batch(method, len(ids))
        finally:
            uncompile(model)
        seconds = time.perf_counter() - began
        rows.append(DemoRow(method, **_means(batches), seconds=seconds, options=options_used))
    return rows


def _answer(model: PreTrainedModel, input_ids: torch.Tensor, answers: torch.Tensor) -> Numbers:
    """The numbers of one batch."""
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=ANSWER_LEN,
        min_new_tokens=ANSWER_LEN,  # all answers are this long: an early end would only skip decode steps
        do_sample=False,
        return_dict_in_generate=True,
    )
    correct = (out.sequences[:, input_ids.shape[1] :] == answers).all(dim=1)
    found: Numbers = dict.fromkeys(_NUMBERS) | {"exact_match": correct.double().mean().item()}
    cache, batch = out.past_key_values, len(input_ids)
    if model._compiled_call_impl is None:
        device_bytes = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        return found | {"device_bytes": device_bytes / batch, "ratio": 1.0}
    stats = specache_fx.stats(cache)
    found |= {"device_bytes": stats.device_bytes / batch, "ratio": stats.device_ratio}
    found |= {"exact_hit_rate": stats.exact_hit_rate, "topk_hit_rate": stats.topk_hit_rate}
    if stats.host_bytes:
        found["host_bytes"] = stats.host_bytes / batch
        found["prefetched_bytes_per_step"] = stats.prefetched_bytes / stats.steps / batch
    return found


def _means(batches: Sequence[tuple[int, Numbers]]) -> dict[str, Any]:
    """Each number over all prompts, which weigh the same; None where no batch has it."""
    means = {}
    for name in _NUMBERS:
        known = [(size, value) for size, numbers in batches if (value := numbers[name]) is not None]
        means[name] = sum(size * x for size, x in known) / sum(size for size, _ in known) if known else None
    return means


def demo_table(settings: DemoSettings, rows: list[DemoRow]) -> Table:
    """One line a method, bytes for one sequence."""
    table = Table(
        title=f"{settings.prompts} prompts of {settings.context:,} tokens with {settings.records} records each;"
        " bytes for one sequence",
        caption="ratio: KV bytes on the device to the full cache's. token hits: the speculative token was the next"
        " one. top-k hits: the KV pairs wanted had been prefetched.",
        box=box.SIMPLE_HEAD,  # fits into 80 columns, like the headers in two lines
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("method", no_wrap=True)
    for header in ("exact\nmatch", "device\nKV", "\nratio", "host\nKV", "token\nhits", "top-k\nhits"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("fetched\na step", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method,
            f"{row.exact_match:.2f}",
            format_size(row.device_bytes),
            f"{row.ratio:.2f}x",
            _or_dash(format_size, row.host_bytes),
            _or_dash("{:.2f}".format, row.exact_hit_rate),
            _or_dash("{:.2f}".format, row.topk_hit_rate),
            _or_dash(format_size, row.prefetched_bytes_per_step),
        )
    return table


def _or_dash(write: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else write(value)


def demo_json(settings: DemoSettings, rows: list[DemoRow], threads: int | None = None) -> dict[str, Any]:
    """The report: rows, settings, machine and versions.

    Args:
        settings: Of the run.
        rows: Its results.
        threads: CPU threads it ran with; torch's choice by default.
    """
    made = provenance(torch.device("cpu"))
    if threads is not None:
        made["device"]["threads"] = threads
    return {
        **made,
        "settings": asdict(settings) | {"model": os.path.relpath(settings.model)},
        "rows": [asdict(row) for row in rows],
    }
