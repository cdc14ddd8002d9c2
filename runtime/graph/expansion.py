"""Keys and values that are computed from a cached latent, token by token: multi-head latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from specache_fx.runtime.kernels import Expand


@dataclass(frozen=True)
class Expansion:
    """The graphs by which an attention's keys and values are computed from its cache.

    Attributes:
        graph: `(cached keys, cached values, tokens, *inputs) -> (keys, values)`.
        inputs: Positions of its further inputs (weights) among Dynamo's.
        chunk: Tokens that it takes at a time; None where it takes any number.
    """

    graph: GraphModule
    inputs: tuple[int, ...]
    chunk: int | None

    def bind(self, args: Sequence[Any]) -> Expand:
        """The function, with the weights of a call.

        Args:
            args: Dynamo's inputs.

        Returns:
            Of cached keys `[batch, heads, tokens, dim]` and cached values of the same tokens, the keys
            `[batch, num_kv_heads, tokens, key_dim]` and the values `[batch, num_kv_heads, tokens, value_dim]`.
        """
        more = [args[i] for i in self.inputs]

        def expand(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._run(key, value, more)

        return expand

    def _run(
        self, key: torch.Tensor, value: torch.Tensor, more: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = key.shape[2]
        if self.chunk is None:
            out: tuple[torch.Tensor, torch.Tensor] = self.graph(key, value, tokens, *more)
            return out
        missing = -tokens % self.chunk
        sides = [torch.nn.functional.pad(side, (0, 0, 0, missing)) for side in (key, value)]
        chunks = zip(*(side.split(self.chunk, dim=2) for side in sides), strict=True)
        parts = [self.graph(*chunk, self.chunk, *more) for chunk in chunks]
        keys, values = (torch.cat(part, dim=2)[:, :, :tokens] for part in zip(*parts, strict=True))
        return keys, values
