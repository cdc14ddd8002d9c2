"""Nothing makes the host of a GPU wait in a plain decode step, with masks and without."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.triton_mode import needs_triton
from support.zoo import build
from torch.utils._python_dispatch import TorchDispatchMode

import specache_fx
from specache_fx.runners.decode_runner import Decode

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


def waits_of_steps(name: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> list[Counter[Any]]:
    """Of each decode step."""
    model: Any = build(name, vocab_size=64, hidden_size=32, head_dim=8)
    steps: list[Counter[Any]] = []
    usual = Decode.__call__

    def call(self: Decode, *args: Any) -> Any:
        with Waits() as waits:
            result = usual(self, *args)
        steps.append(waits.found)
        return result

    monkeypatch.setattr(Decode, "__call__", call)
    specache_fx.compile(
        model, kernel="triton", lowering="eager", group_size=8, residual_length=8, top_k=4, lookahead="token"
    )
    ids = torch.randint(1, 64, (1, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    model.generate(
        ids, attention_mask=mask, max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0
    )
    return steps


# The interpreter takes a second a step.
@pytest.mark.parametrize(
    ("name", "padding"),
    nightly_unless(
        ("plain-window", 7).__eq__, [("plain", 7), ("plain", 0), ("plain-window", 0), ("plain-window", 7)]
    ),
)
def test_plain_steps_wait_for_nothing(name: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = waits_of_steps(name, padding, monkeypatch)
    # 20 tokens: a group fills, and masks are compared with the padding, where the next length is a multiple of 8.
    plain = [found for i, found in enumerate(steps) if i and (21 + i) % 8]
    assert 5 < len(plain) < len(steps) - 1
    for found in plain:
        waits = {place: times for place, times in found.items() if place not in CPU_ALONE}
        assert not waits
