"""Numbers that runs of an attention find, and forms that runs of few keys would not tell from another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import graphs
from torch import Tensor

from specache_fx.capture.attention.run_form import from_softmax
from specache_fx.capture.graph.graph_edit import CallsOnce
from specache_fx.capture.graph.left_alone import UnknownFormError
from specache_fx.capture.program import AttentionCore

Q, K, PAST = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8), torch.randn(2, 4, 5, 8)


def core_of(scores: Callable[[Tensor], Tensor]) -> AttentionCore:
    """Attention over a cache that grows; `scores` are made of the products."""

    def function(q: Tensor, k: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([past, k], 2)
        return scores(q @ keys.mT).softmax(-1) @ keys, keys

    gm = graphs.traced(function, Q, K, PAST)
    (softmax,) = graphs.nodes_of(gm, torch.ops.aten._softmax.default)
    return from_softmax(gm, softmax, set(gm.graph.output_node().all_input_nodes), CallsOnce())


@pytest.mark.parametrize(
    ("scores", "scale", "softcap"),
    [
        (lambda s: s * 0.3, 0.3, None),
        (lambda s: -s / 4, -0.25, None),
        (lambda s: 20 * torch.tanh(s * 0.3 / 20), 0.3, 20.0),
        (lambda s: s * 0.3 - (s * 0.3).amax(-1, keepdim=True), 0.3, None),
    ],
    ids=["factor", "negative", "softcap", "less its largest"],
)
def test_scale_and_softcap_are_found_by_runs(
    scores: Callable[[Tensor], Tensor], scale: float, softcap: float | None
) -> None:
    core = core_of(scores)
    assert core.scale == pytest.approx(scale, rel=1e-6)
    assert core.softcap == (softcap and pytest.approx(softcap, rel=1e-6))


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (lambda s: s.clamp(max=1e6), r"\(clamp, .* makes other scores of the products"),
        (lambda s: torch.where(torch.arange(6) < 9000, s, 2 * s), "from 9000 keys on, too many to prove it"),
        (lambda s: s * torch.arange(4)[:, None, None], r"\(mul, .* makes other scores of the products"),
    ],
    ids=["far out", "many keys", "heads"],
)
def test_another_form_is_named(scores: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(UnknownFormError, match=reason):
        core_of(scores)
