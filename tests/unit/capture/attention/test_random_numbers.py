"""Proofs in float32 multiply in full float32, however the user has set TF32; afterwards it is as the user set it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import graphs
from support.graphs import Captured
from support.watch import Watch

BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def set_as_before_torch_2_9() -> None:
    torch.set_float32_matmul_precision("high")


def set_by_backend() -> None:
    for backend in BACKENDS:
        backend.fp32_precision = "tf32"


@pytest.fixture(autouse=True)
def precision_of_other_tests() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def expansion() -> Captured:
    model = graphs.tiny_decoder(num_kv_heads=1, head_dim=16, latent_dim=12)
    ids = torch.arange(7)[None]
    return graphs.capture(model, lambda forward: forward(ids[:, 6:], past=forward(ids[:, :6])[1]))[1]


@pytest.mark.parametrize("allow", [set_as_before_torch_2_9, set_by_backend])
def test_proofs_multiply_in_full_float32(allow: Callable[[], None]) -> None:
    decode = expansion()
    allow()
    before = [backend.fp32_precision for backend in BACKENDS]
    seen = set()

    def note(func: Any, args: Any, _: Any) -> None:
        """Under which precision products of real numbers are computed."""
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default) and type(args[0]) is torch.Tensor:
            seen.add(tuple(backend.fp32_precision for backend in BACKENDS))

    with Watch(note):
        program = graphs.matched(decode)
    assert len(program.sites) == 1 and not program.refusals
    assert seen == {("ieee", "ieee")}
    assert [backend.fp32_precision for backend in BACKENDS] == before
