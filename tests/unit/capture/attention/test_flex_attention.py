"""`flex_attention` in the normal form of an attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import graphs
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from specache_fx.capture.analyse import attention_cores
from specache_fx.capture.attention.flex_attention import is_flex, masks_alone_as_sdpa
from specache_fx.capture.graph.graph_utils import shape_of
from specache_fx.runtime.ops import SDPA

Q, K, PAST = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 8), torch.randn(1, 4, 5, 8)


@pytest.fixture(autouse=True)
def uncompiled_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of graphs `flex_attention` would compile itself."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def newest(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j > 1


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - (5 - j) * 0.5


def step(score_mod: Any = None, blocks: BlockMask | None = None) -> tuple[GraphModule, tuple[Any, ...]]:
    def function(q: Tensor, k: Tensor, past: Tensor) -> Any:
        keys = torch.cat([past, k], 2)
        return flex_attention(q, keys, keys, score_mod, blocks), keys

    (taken,) = graphs.capture(graphs.FunctionModule(function), lambda model: model(Q, K, PAST))
    return taken.copy(), taken.inputs


def masked() -> BlockMask:
    return create_block_mask(newest, None, None, 1, 6, device="cpu")


def test_a_mask_alone_makes_sdpa_that_computes_the_same() -> None:
    gm, inputs = step(blocks=masked())
    gm = masks_alone_as_sdpa(gm)
    (attention,) = graphs.nodes_of(gm, SDPA)
    assert not any(map(is_flex, gm.graph.nodes)) and (shape_of(attention.args[3]) or ())[-2:] == (1, 6)
    out, keys = gm(*inputs)
    torch.testing.assert_close(out, flex_attention(Q, keys, keys, None, masked()))


def test_no_mod_makes_sdpa_without_a_mask() -> None:
    (attention,) = graphs.nodes_of(masks_alone_as_sdpa(step()[0]), SDPA)
    assert attention.args[3] is None


def test_changed_scores_stay_and_have_their_meaning_as_a_mask() -> None:
    gm = masks_alone_as_sdpa(step(alibi)[0])
    assert any(map(is_flex, gm.graph.nodes))
    (core,), unknown = attention_cores(gm)
    assert unknown == {} and core.mask is not None
    assert core.scale == pytest.approx(8**-0.5, rel=1e-6)


def test_blocks_without_a_mod_are_left_alone() -> None:
    whole = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(whole, torch.zeros(1, 1, 1, 1, dtype=torch.int32), seq_lengths=(1, 6))
    _, unknown = attention_cores(masks_alone_as_sdpa(step(blocks=blocks)[0]))
    (reason,) = unknown.values()
    assert "its block mask has no mask_mod" in reason
