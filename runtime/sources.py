"""Inputs that tell a decode graph's place in the sequence, and their values some tokens later.

A decode graph knows its place in several ways: position ids, the length of the past, masks that grow by one. `Sources`
names these inputs (`capture/positions/find_sources.py` finds them). `Sources.ahead` makes them as they would be some
tokens later. The *prelude* is computed from them alone: cos and sin, position embeddings. So it can be evaluated for
the output token and for the speculative token that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule


@dataclass(frozen=True)
class Sources:
    """Positions among Dynamo's inputs.

    Attributes:
        token: The token ids, int `[batch, 1]`; None where the graph takes none.
        vocabulary: Rows of the token's embedding table.
        lengths: Integers that grow by one per token.
        positions: Integer tensors that grow by one per token.
        masks: Masks over keys, whose last dimension grows by one per token.
        shapes: Past KV tensors; where only their shape is read, that is a length too.
        whole_ids: Ids of the whole sequence, of which the newest are an input of their own.
        max_lengths: The most tokens of such a tensor, or of the integer that is its length, where its layer keeps
            a window; and the most columns of a mask of such layers alone.
        mask_graph: Computes the masks of attentions to all tokens; None where they have none.
        mask_inputs: Positions of its inputs.
        layer_masks: Which of its results is the mask of a layer; layers without a mask are left out.
        knows_next: The next token's position can be told. Not where Dynamo made the length a constant of the graph
            (it compiles such a graph once, for the first decode step of some models) and no position is passed in.
        fixed_length: The past's length is a constant of the graph: it can't say what a longer one would be.
    """

    token: int | None = None
    vocabulary: int | None = None
    lengths: frozenset[int] = frozenset()
    positions: frozenset[int] = frozenset()
    masks: frozenset[int] = frozenset()
    shapes: frozenset[int] = frozenset()
    whole_ids: frozenset[int] = frozenset()
    max_lengths: dict[int, int] = field(default_factory=dict)
    mask_graph: GraphModule | None = None
    mask_inputs: tuple[int, ...] = ()
    layer_masks: dict[int, int] = field(default_factory=dict)
    knows_next: bool = True
    fixed_length: bool = False

    def ahead(self, args: Sequence[Any], inputs: Sequence[int], num_tokens: int) -> list[Any]:
        """The inputs as they would be `num_tokens` later.

        Args:
            args: Dynamo's inputs.
            inputs: Which of them are wanted.
            num_tokens: How far ahead; 0 gives them as they are.
        """
        if not num_tokens:
            return [args[i] for i in inputs]
        moved: list[Any] = []
        for i in inputs:
            value = args[i]
            if i in self.lengths or i in self.positions:
                value = (
                    min(value + num_tokens, self.max_lengths[i])
                    if i in self.max_lengths
                    else value + num_tokens
                )
            elif i in self.masks:
                # A mask of four dimensions is added where it is of floating point numbers; others are 1 where one sees.
                shown = 0 if value.dim() == 4 and value.is_floating_point() else 1
                more = value.new_full((*value.shape[:-1], num_tokens), shown)
                value = torch.cat([value, more], dim=-1)[
                    ..., -self.max_lengths.get(i, value.shape[-1] + num_tokens) :
                ]
            elif i in self.shapes:
                batch, heads, kv_len, dim = value.shape
                kv_len = min(kv_len + num_tokens, self.max_lengths.get(i, kv_len + num_tokens))
                value = value.new_empty(1).expand(batch, heads, kv_len, dim)
            moved.append(value)
        return moved

    def masks_at(self, args: Sequence[Any], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The masks that the model would apply `num_tokens` later: their newest query's rows, see `masks.split_row`."""
        if self.mask_graph is None:
            return ()
        # Not mask_graph(...), which prints its code where it raises.
        masks = self.mask_graph.forward(*self.ahead(args, self.mask_inputs, num_tokens))
        return tuple(mask if mask.dim() < 2 else mask[..., -1, :] for mask in masks)


@dataclass(frozen=True)
class Prelude:
    """The part of a decode graph that depends on positions and lengths alone.

    Attributes:
        graph: Computes the boundary tensors.
        graph_ahead: The same, with embedding indices held inside their tables: the token after the last one that a
            model can take has no position, and only the speculative lane would ask for it.
        inputs: Positions of its inputs among Dynamo's.
        sources: How they move.
    """

    graph: GraphModule
    graph_ahead: GraphModule
    inputs: tuple[int, ...]
    sources: Sources

    def __call__(self, args: Sequence[Any], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The boundary tensors for the token `num_tokens` after the current one."""
        graph = self.graph_ahead if num_tokens else self.graph
        boundary: tuple[torch.Tensor, ...] = graph.forward(*self.sources.ahead(args, self.inputs, num_tokens))
        return boundary

    def following(
        self, args: Sequence[Any], num_tokens: int, current: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """As a call, but `current` where the model has no such position (the end of a table of rotations)."""
        if not num_tokens:
            return current
        try:
            ahead = self(args, num_tokens)
        except (IndexError, RuntimeError):
            return current
        fits = all(new.shape == old.shape for new, old in zip(ahead, current, strict=True))
        return ahead if fits else current
