"""Nothing makes the host of a GPU wait in a plain decode step, with masks and without."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from support.triton_mode import needs_triton
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import specache_fx
from specache_fx.decode_runner import Decode

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), needs_triton]

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
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=kinds))


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
    specache_fx.compile(
        model.eval(), kernel="triton", lowering="eager", group_size=8, residual_length=8, top_k=4
    )
    ids = torch.randint(1, 64, (1, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    model.generate(
        ids, attention_mask=mask, max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0
    )
    return steps


@pytest.mark.parametrize(
    ("make", "padding"),
    [
        # The interpreter takes a second a step.
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((llama, 7), (llama, 0), (gemma, 0))),
        (gemma, 7),
    ],
)
def test_plain_steps_wait_for_nothing(make: Any, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = waits_of_steps(make(), padding, monkeypatch)
    # 20 tokens: a group fills, and masks are compared with the padding, where the next length is a multiple of 8.
    plain = [found for i, found in enumerate(steps) if i and (21 + i) % 8]
    assert 5 < len(plain) < len(steps) - 1
    for found in plain:
        waits = {place: times for place, times in found.items() if place not in CPU_ALONE}
        assert not waits
