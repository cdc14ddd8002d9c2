"""The masks of attentions over a window: the pairs that each lane attends to.

A layer with a sliding window or with chunks hides more than padding, and its mask moves with every token. The
model's own mask graph is evaluated in each step, for the output token and, with everything moved on by one, for the
speculative one. Both are as wide as the window, whatever the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from specache_fx.runtime.masks import WindowMask
from specache_fx.runtime.session import Session
from specache_fx.runtime.sources import Sources


@dataclass(frozen=True)
class WindowMasks:
    """Masks of the layers that keep a window, as the model computes them.

    Attributes:
        graph: Computes them; None where there are none at all.
        inputs: Positions of its inputs among Dynamo's.
        layers: Layer to the mask's place among the results; a layer that is not there attends to its whole window.
        sources: How the inputs move.
        moves: All that the masks depend on can be moved on by a token: no length is a constant of the graph.
    """

    graph: GraphModule | None
    inputs: tuple[int, ...]
    layers: dict[int, int]
    sources: Sources
    moves: bool

    def at(self, session: Session, args: Sequence[Any], num_tokens: int) -> dict[int, WindowMask] | None:
        """The model's mask of its token, now or `num_tokens` later, and the bias of the scores.

        Returns:
            By layer. None where it can't be told: Dynamo makes a graph of its own for the step in which a window fills
            up, and moved on it would ask for a token that is not there.
        """
        if self.graph is None:
            return {}
        lengths = {layer: session.shapes[layer].tokens(session.kv_len + num_tokens) for layer in self.layers}
        fills = any(session.shapes[layer].window == session.kv_len + 1 for layer in self.layers)
        if num_tokens and (fills or not self.moves):
            return None
        assert session.batch is not None
        try:
            rows = self.graph.forward(*self.sources.ahead(args, self.inputs, num_tokens))
        except (IndexError, RuntimeError):
            if num_tokens:
                return None  # the model has no such position
            raise
        if num_tokens and any(rows[i].shape[-1] != lengths[layer] + 1 for layer, i in self.layers.items()):
            return None
        masks = [WindowMask.of(row if row.dim() < 2 else row[..., -1, :], session.batch) for row in rows]
        return {layer: masks[i] for layer, i in self.layers.items()}
