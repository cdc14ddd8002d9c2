"""What users call: transformers' Llama with random weights, prefilled and decoded, with and without this package."""

from __future__ import annotations

import time
from typing import Any

import torch

import specache_fx
from benchmarks.gpu.decoder import sync
from benchmarks.gpu.run import Run
from benchmarks.gpu.shapes import SHAPES, ModelShape
from specache_fx.compiled import uncompile

METHODS: dict[str, dict[str, Any] | None] = {
    "transformers": None,
    "specache-2": {"bits": 2},
    "kivi-2": {"policy": "kivi", "bits": 2},
}


def whole_model(run: Run, found: dict[str, Any]) -> None:
    """Peak memory and seconds of a prompt, and milliseconds of a decode step, by method."""
    shape = SHAPES["tiny" if run.quick else "llama-3.1-8b"].cut(4)
    tokens, steps = (100, 3) if run.quick else (32768, 16)
    found |= {"model": shape.name, "layers": shape.num_layers, "batch": 1, "context": tokens}
    model = _make_model(run, shape)
    found["weight_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    prompt = torch.randint(0, shape.vocab, (1, tokens), device=run.device)
    for method, given in METHODS.items():
        options = given | {"lowering": "eager"} if run.quick and given is not None else given
        entry: dict[str, Any] = {}
        found[method] = entry
        run.attempt(
            entry, lambda options=options, entry=entry: _measure(run, model, options, prompt, steps, entry)
        )  # type: ignore[misc]


def generated(
    run: Run, shape: ModelShape, options: dict[str, Any], tokens: int, entry: dict[str, Any]
) -> None:
    """The same for one set of options."""
    options = options | {"lowering": "eager"} if run.quick else options
    prompt = torch.randint(0, shape.vocab, (1, tokens), device=run.device)
    _measure(run, _make_model(run, shape), options, prompt, 3 if run.quick else 16, entry)


def _make_model(run: Run, shape: ModelShape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=1 << 17,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(run.dtype)
    try:
        with run.device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _measure(
    run: Run,
    model: Any,
    options: dict[str, Any] | None,
    prompt: torch.Tensor,
    steps: int,
    entry: dict[str, Any],
) -> None:
    uncompile(model)
    if options is not None:
        specache_fx.compile(model, **options)
    with torch.inference_mode():
        # Compiles, where there is something to compile; and what is compiled for one length serves all.
        start = time.perf_counter()
        for length in (prompt.shape[1] // 4, prompt.shape[1] // 2):
            _decode(run, model, prompt[:, :length], 2)
        entry["warm_up_s"] = time.perf_counter() - start
        run.free()
        before = torch.cuda.memory_allocated(run.device) if run.device.type == "cuda" else 0
        run.reset_peak()
        sync(run.device)
        start = time.perf_counter()
        past, token = _prefill(model, prompt)
        sync(run.device)
        entry["prefill_s"] = time.perf_counter() - start
        peak = run.peak()
        entry["prefill_peak_bytes_over_weights"] = None if peak is None else peak - before
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            past, token = _prefill(model, token, past)
            sync(run.device)
            times.append(time.perf_counter() - start)
        entry["decode_ms_median"] = 1000 * sorted(times)[len(times) // 2]
        entry["reserved_bytes"] = run.reserved()
        if options is not None:
            stats = specache_fx.stats(past)
            entry |= {"device_bytes": stats.device_bytes, "full_bytes": stats.full_bytes}
        del past


def _prefill(model: Any, tokens: torch.Tensor, past: Any = None) -> tuple[Any, torch.Tensor]:
    # As `generate()` calls it: with a mask, which hides nothing.
    length = tokens.shape[1] + (0 if past is None else past.get_seq_length())
    mask = tokens.new_ones((len(tokens), length))
    out = model(tokens, attention_mask=mask, past_key_values=past, use_cache=True, logits_to_keep=1)
    return out.past_key_values, out.logits[:, -1:].argmax(-1)


def _decode(run: Run, model: Any, prompt: torch.Tensor, steps: int) -> None:
    past, token = _prefill(model, prompt)
    for _ in range(steps):
        past, token = _prefill(model, token, past)
    sync(run.device)
