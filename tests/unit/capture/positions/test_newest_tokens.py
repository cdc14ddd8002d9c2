"""`newest_tokens`: graphs that stay as they are. `tests/models/test_spellings.py` has those that change."""

from __future__ import annotations

import torch
from support import graphs

from specache_fx.capture.positions.newest_tokens import newest_tokens


class Sliced(torch.nn.Module):
    """Slices of a dimension that is no sequence, and of a mask that indexes no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(61, 8).requires_grad_(False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        return x[-1:], x * mask[:, -3:, None].sum(1, keepdim=True)


def test_other_slices_stay_as_they_are() -> None:
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)
    (captured,) = graphs.capture(Sliced(), lambda model: model(ids, mask))
    gm = captured.copy()
    before = graphs.code(gm)
    assert newest_tokens(gm) == []
    assert graphs.code(gm) == before


def test_a_prompt_whose_last_logits_alone_are_computed_stays_as_it_is() -> None:
    """The residual stream is the embedding of the ids plus what attention adds: it can't be cut to the newest."""
    ids = torch.randint(1, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    for captured in graphs.capture(graphs.tiny_llama(), lambda model: model(ids, logits_to_keep=1)):
        gm = captured.copy()
        before = graphs.code(gm)
        assert "slice" in before
        assert newest_tokens(gm) == []
        assert graphs.code(gm) == before
