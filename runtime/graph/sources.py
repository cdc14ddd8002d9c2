"""Inputs that tell a decode graph's place in the sequence, and what is computed from them alone.

A decode graph knows its place in several ways: position ids, the length of the past, masks that grow by one. `Sources`
names these inputs (`capture/positions/find_sources.py` finds them), and makes them as they would be some tokens later.
A `PositionalPart` of the graph is computed from them alone: position embeddings, masks. So it can be evaluated for the
output token and for the speculative token that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specache_fx.runtime.graph.graph_part import Part


@dataclass(frozen=True)
class Sources:
    """Positions among Dynamo's inputs.

    Attributes:
        counts: Lengths and positions: integers, and tensors of them, that grow by one per token.
        masks: Masks over keys, whose last dimension grows by one per token.
        caches: Past KV tensors; where only their shape is read, that is a length too.
        max_lengths: The most tokens of such a tensor, or of the integer that is its length, where its layer keeps
            a window; and the most columns of a mask of such layers alone.
        fixed_length: The past's length is a constant of the graph: it can't say what a longer one would be.
    """

    counts: frozenset[int] = frozenset()
    masks: frozenset[int] = frozenset()
    caches: frozenset[int] = frozenset()
    max_lengths: dict[int, int] = field(default_factory=dict)
    fixed_length: bool = False

    @property
    def knows_next(self) -> bool:
        """The next token's position can be told.

        Not where Dynamo made the length a constant of the graph (it compiles such a graph once, for the first decode
        step of some models) and no position is passed in.
        """
        return bool(self.counts) or not self.fixed_length

    def ahead(self, args: Sequence[Any], inputs: Sequence[int], num_tokens: int) -> list[Any]:
        """Those of Dynamo's inputs `args` that are wanted, as they would be `num_tokens` later."""
        return [self._moved(i, args[i], num_tokens) for i in inputs]

    def _moved(self, place: int, value: Any, num_tokens: int) -> Any:
        most = self.max_lengths.get(place)
        if place in self.counts:
            return value + num_tokens if most is None else min(value + num_tokens, most)
        if place in self.masks:
            # A mask of four dimensions is added where it is of floating point numbers; others are 1 where one sees.
            shown = 0 if value.dim() == 4 and value.is_floating_point() else 1
            whole = torch.cat([value, value.new_full((*value.shape[:-1], num_tokens), shown)], dim=-1)
            return whole if most is None else whole[..., -most:]
        if place in self.caches:
            batch, heads, kv_len, dim = value.shape
            kv_len = kv_len + num_tokens if most is None else min(kv_len + num_tokens, most)
            return value.new_empty(1).expand(batch, heads, kv_len, dim)
        return value


@dataclass(frozen=True)
class PositionalPart:
    """A part of a decode graph that is computed from positions and lengths alone.

    Attributes:
        part: Computes it for the output token.
        later: The same for a later token, with embedding indices held inside their tables: the token after the last
            one that a model can take has no position, and only the speculative lane would ask for it.
        sources: How the inputs move.
        layers: Of masks, layer to the place of its mask among the results; layers without a mask are left out.
        moves: All that the results depend on can be moved on by a token: no length is a constant of the graph.
    """

    part: Part
    later: Part
    sources: Sources
    layers: dict[int, int] = field(default_factory=dict)
    moves: bool = True

    def now(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The results for the output token, of Dynamo's inputs."""
        return self.part(args)

    def ahead(self, args: Sequence[Any], num_tokens: int) -> tuple[torch.Tensor, ...] | None:
        """The results for the token `num_tokens` after it; None where the model has no such position."""
        if not num_tokens:
            return self.now(args)
        if not self.moves:
            return None
        try:
            return self.later.of(*self.sources.ahead(args, self.later.inputs, num_tokens))
        except (IndexError, RuntimeError):
            return None  # the end of a table of rotations
