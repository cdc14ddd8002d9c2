"""What makes the host of a GPU wait in a plain decode step: one look at each mask of all keys, and nothing else."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import specache_fx
from specache_fx.decode_runner import Decode

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WAITS = {
    "aten._local_scalar_dense.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten._pin_memory.default",
}
# Branches of the CPU: a handle's numbers are compared, and where all guesses were right nothing is looked up.
CPU_ALONE = {("claims.py", "_own"), ("session.py", "recover")}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}


class Waits(TorchDispatchMode):
    """Operators that wait, by the innermost place of ours that called them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in WAITS:
            ours = [
                f
                for f in traceback.extract_stack()
                if "/runtime/" in f.filename or "/specache_fx/" in f.filename
            ]
            self.found[ours[-1].filename.rsplit("/", 1)[-1], ours[-1].name] += 1
        return func(*args, **(kwargs or {}))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def gemma() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=16, layer_types=kinds))


def waits_of_steps(
    model: PreTrainedModel, padding: int, monkeypatch: pytest.MonkeyPatch
) -> list[Counter[Any]]:
    """Of each decode step."""
    steps: list[Counter[Any]] = []
    usual = Decode.__call__

    def call(self: Decode, *args: Any) -> Any:
        with Waits() as waits:
            result = usual(self, *args)
        steps.append(waits.found)
        return result

    monkeypatch.setattr(Decode, "__call__", call)
    specache_fx.compile(model.eval(), lowering="eager", group_size=16, residual_length=16, top_k=4)
    ids = torch.randint(1, 64, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
    return steps


@pytest.mark.parametrize(
    ("make", "padding", "most"), [(llama, 0, 0), (llama, 7, 1), (gemma, 0, 1), (gemma, 7, 1)]
)
def test_plain_steps_wait_once_for_a_mask_and_for_nothing_else(
    make: Any, padding: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = waits_of_steps(make(), padding, monkeypatch)
    # 60 tokens: a group fills, and masks are read ahead, where the length is a multiple of 16.
    plain = [found for i, found in enumerate(steps) if i and (60 + i) % 16]
    assert len(plain) > 15
    for found in plain:
        waits = {place: times for place, times in found.items() if place not in CPU_ALONE}
        assert sum(waits.values()) <= most, waits
