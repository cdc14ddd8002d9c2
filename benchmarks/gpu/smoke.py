"""A tiny model through `compile` and `generate` in the ways that people use: with bits=16 its tokens equal eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import specache_fx
from benchmarks.gpu.run import Run
from specache_fx.compiled import uncompile

_NEW_TOKENS = 80
_OPTIONS = {"group_size": 16, "residual_length": 16, "top_k": 16}  # groups fill on the way


def smoke(run: Run, found: dict[str, Any]) -> None:
    """Eager and Inductor: tokens, padding, crop, beams at 16 bits; and 2 bits, where it is enough to run."""
    model = _tiny(run)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "tokens": lambda: _generate(model, _prompt(run, 1, 40)),
        "padding": lambda: _generate(model, _prompt(run, 3, 40), padded=True),
        "crop": lambda: _cropped(model, _prompt(run, 1, 40)),
        "beams": lambda: _generate(model, _prompt(run, 2, 40), num_beams=3),
    }
    wanted = {name: way() for name, way in ways.items()}
    for lowering in ("eager",) if run.quick else ("eager", "inductor"):
        for name, way in ways.items():
            entry: dict[str, Any] = {}
            found[f"{lowering}, {name}"] = entry
            run.attempt(
                entry,
                lambda lowering=lowering, name=name, way=way, entry=entry: entry.update(  # type: ignore[misc]
                    equal=torch.equal(_compiled(model, lowering, 16, way), wanted[name])
                ),
            )
        entry = {}
        found[f"{lowering}, 2 bits"] = entry
        run.attempt(entry, lambda lowering=lowering, entry=entry: _low_bits(run, model, lowering, entry))  # type: ignore[misc]


def _tiny(run: Run) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if (
            weight.dim() > 1
        ):  # else attention is almost uniform, and nothing that is forgotten would be missed
            weight.data.normal_(std=0.15, generator=generator)
    return model.to(run.device, torch.float32).eval()  # exact: equal tokens are equal sums


def _prompt(run: Run, batch: int, tokens: int) -> torch.Tensor:
    made = torch.randint(1, 256, (batch, tokens), generator=torch.Generator().manual_seed(batch))
    return made.to(run.device)


def _compiled(model: Any, lowering: str, bits: int, way: Callable[[], torch.Tensor]) -> torch.Tensor:
    uncompile(model)
    torch.compiler.reset()
    specache_fx.compile(model, bits=bits, lowering=lowering, **_OPTIONS)
    try:
        return way()
    finally:
        uncompile(model)


def _generate(model: Any, prompt: torch.Tensor, padded: bool = False, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    if padded:
        for row in range(len(prompt)):
            mask[row, : 7 * row] = 0
    made = model.generate(
        prompt, attention_mask=mask, max_new_tokens=_NEW_TOKENS, do_sample=False, use_cache=True, **options
    )
    assert isinstance(made, torch.Tensor)
    return made


def _cropped(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Generate, take back ten tokens, and go on by two others at once."""
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    past = first.past_key_values
    past.crop(-10)
    again = torch.cat([first.sequences[:, : past.get_seq_length()], prompt[:, :2]], 1)
    second = model.generate(again, attention_mask=torch.ones_like(again), past_key_values=past, **options)
    return torch.cat([first.sequences, second.sequences], 1)


def _low_bits(run: Run, model: Any, lowering: str, entry: dict[str, Any]) -> None:
    """What a user's first call gives: tokens, bytes, hit rates."""
    low = model if run.quick else model.to(torch.bfloat16)

    def way() -> torch.Tensor:
        prompt = _prompt(run, 2, 200)
        out = low.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
        stats = specache_fx.stats(out.past_key_values)
        entry.update(kv_len=stats.kv_len, device_bytes=stats.device_bytes, full_bytes=stats.full_bytes)
        entry.update(topk_hit_rate=stats.topk_hit_rate, ok=stats.kv_len == 199 + _NEW_TOKENS)
        return out.sequences

    try:
        _compiled(low, lowering, 2, way)
    finally:
        model.to(torch.float32)
