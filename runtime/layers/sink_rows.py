"""`SinkRows`: the 16-bit pairs of each sequence's first tokens, which stay on the device for good.

Attention puts much weight on the first tokens whatever they say (attention sinks; Xiao et al., StreamingLLM, §3.1), so
that an error in their keys is an error of every step. While they are in the window they are there at 16 bits anyway:
they are taken when they are quantised, and replace their low-bit copies from then on, as prefetched pairs do.
"""

from __future__ import annotations

import torch


class SinkRows:
    """One layer's rows for `SpecacheConfig.sink_tokens`.

    Padding decides which tokens are the first, and is asked for when tokens are quantised. A chunk of a prompt may be
    nothing but padding for a sequence. Its mask may say that it isn't: a query that sees no key is shown all of them.
    The next chunk's mask tells. So rows that have turned out to be padding are given up for tokens that come.

    Args:
        rows: `[batch, num_kv_heads, sink_tokens, key_dim + value_dim]` of the KV dtype, the layer's own memory.
        indices: Their tokens, int32 `[batch, sink_tokens]`, ascending; -1 where a row is empty.
    """

    def __init__(self, rows: torch.Tensor, indices: torch.Tensor) -> None:
        self.rows, self.indices = rows, indices

    def clear(self) -> None:
        """Have no rows."""
        # Zeros: kernels may multiply what an empty row holds by 0, and NaN would survive that.
        self.rows.zero_()
        self.indices.fill_(-1)

    def offer(self, start: int, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None) -> None:
        """Take those of the tokens that are being quantised that are among their sequence's first.

        Args:
            start: Index of the first of them. All earlier ones have been offered.
            key: `[batch, num_kv_heads, tokens, key_dim]`.
            value: `[batch, num_kv_heads, tokens, value_dim]`.
            real: Which tokens are no padding, bool `[batch, start + tokens or more]`; None where all are.
        """
        count, tokens = self.indices.shape[1], key.shape[2]
        positions = torch.arange(start, start + tokens, dtype=torch.int32, device=key.device)
        found = torch.cat([self.indices, positions.expand(key.shape[0], -1)], dim=1)
        usable = found >= 0
        if real is not None:
            usable &= real.gather(1, found.clamp(min=0).long())
        order = torch.arange(count + tokens, device=key.device)
        last = count + tokens  # stands for none
        chosen = torch.where(usable, order, last).topk(count, dim=1, largest=False, sorted=True).values
        indices = torch.nn.functional.pad(found, (0, 1), value=-1).gather(1, chosen)
        held = self.rows.gather(2, _over(chosen.clamp(max=count - 1), self.rows))
        new = (chosen - count).clamp(0, tokens - 1)
        pairs = torch.cat([side.gather(2, _over(new, side)) for side in (key, value)], dim=3)
        self.rows.copy_(torch.where((chosen < count)[:, None, :, None], held, pairs))
        self.indices.copy_(indices)

    def truncate(self, num_tokens: int) -> None:
        """Give up the rows of tokens from `num_tokens` on: they are no longer quantised."""
        self.indices.masked_fill_(self.indices >= num_tokens, -1)

    def staged(self, others: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and indices for a kernel (`DecodeInputs.staged_rows`), behind those that were prefetched, if any."""
        indices = self.indices[:, None].expand(-1, self.rows.shape[1], -1)
        if others is None:
            return self.rows, indices.contiguous()  # as the transfer's are
        return torch.cat([others[0], self.rows], dim=2), torch.cat([others[1], indices], dim=2)

    def restore(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Low-bit copies of all quantised tokens, `[batch, num_kv_heads, tokens, dim]` each, with these rows put in."""
        rows = self.rows.split([key.shape[3], value.shape[3]], dim=3)
        at = torch.where(self.indices < 0, key.shape[2], self.indices).long()
        exact = []
        for side, sink in zip((key, value), rows, strict=True):
            padded = torch.nn.functional.pad(side, (0, 0, 0, 1))  # where empty rows go, and are cut off again
            exact.append(padded.scatter_(2, _over(at, side), sink)[:, :, : side.shape[2]])
        return exact[0], exact[1]

    def hide(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores that no selection chooses these tokens by: -1 there.

        Args:
            scores: float32 `[lanes, batch, num_kv_heads, tokens]`.
        """
        tokens = scores.shape[3]
        hidden = torch.zeros(scores.shape[1], tokens + 1, dtype=torch.bool, device=scores.device)
        # Slots that are empty, or not among these tokens, land in a column that is cut off again.
        at = torch.where((self.indices < 0) | (self.indices >= tokens), tokens, self.indices)
        hidden.scatter_(1, at.long(), True)
        return scores.masked_fill(hidden[None, :, None, :tokens], -1.0)


def _over(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[batch, n]` as an index into dimension 2 of `[batch, heads, tokens, dim]`."""
    return index[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])
