"""What a step returns is the caller's own, whatever its form: the next replay overwrites the graph's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specache_fx.runners.decode_runner import _copied


@pytest.mark.parametrize(
    "result",
    [
        torch.randn(1, 1, 49152).bfloat16(),
        torch.randn(2, 1, 7),
        torch.randn(3, 5).half()[1:],  # begins within a word
        torch.randn(4, 6)[:, ::2],
        torch.randn(9, 8)[1:],
        torch.randn(()),
        torch.randn(0, 8),
        torch.arange(4).to(torch.uint8),
        torch.randn(3, 4, dtype=torch.complex64),
        torch.zeros(2, 8, dtype=torch.bool),
    ],
    ids=lambda x: f"{x.dtype}-{tuple(x.shape)}",
)
def test_a_result_is_copied_as_it_is(result: Tensor) -> None:
    wanted, copy = result.clone(), _copied(result)
    assert (copy.dtype, copy.shape, copy.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    result.fill_(1) if result.dtype == torch.bool else result.add_(1)
    assert torch.equal(copy, wanted)


def test_what_is_no_tensor_is_returned() -> None:
    assert _copied(3) == 3 and _copied(None) is None
