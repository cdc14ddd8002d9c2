"""Attention of several tokens whose mask is told by a rule, and not by `[q_len, kv_len]` numbers.

Nearly all masks follow one rule: a query sees the real keys up to its own, of a sliding window the newest. The queries
are those of the newest keys: all of a prompt, or what follows a cache. A graph tests its masks against the rule
(`passes/prompt_masks.py`). An attention reads the verdict and makes what it needs of the mask, a block of queries at a
time. Where the rule is another, or one block without a window has all queries, it makes the model's own mask, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from specache_fx.runtime.graph.graph_part import Part
from specache_fx.runtime.layers.masks import hides

_OTHER, _CAUSAL, _BY_RULE = range(3)  # verdicts of a test
_BLOCK = 512  # queries that share a piece of a mask
_FEW = 128  # queries of a kv head


def check_mask_rule(mask: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Hold a mask against the rule. Inductor fuses it with the mask's own code, so the mask is never in memory.

    Args:
        mask: Bool (True where a key is seen) or float that is added to the scores, `[..., q_len, kv_len]`.
        window: Tokens that a query reaches, its own included; None for all.

    Returns:
        The verdict, int64 `[]`: 1 where each query sees all keys up to its own; 2 where padding or the window hides
        some of these; 0 where the mask is another. And which keys are real, bool `[..., kv_len]`; not those that are
        behind every query's window.
    """
    seen = mask if mask.dtype == torch.bool else mask == 0
    q_len, kv_len = mask.shape[-2:]
    keys = torch.arange(kv_len, device=mask.device)
    own = keys[kv_len - q_len :]  # the keys of the queries
    rule = causal = keys <= own[:, None]
    if window is None:
        real = seen[..., -1, :]
    else:
        rule = causal & (keys > own[:, None] - window)
        real = seen[..., (keys - own[0]).clamp_min(0), keys]  # to the first query that may see a key
    # Not `==`: Inductor's bounds know no comparison of bools (torch 2.13).
    follows = ~(seen ^ (rule & real.unsqueeze(-2))).any()
    whole = real.all() if window is None else real.all() & ~(rule ^ causal).any()
    if mask.dtype != torch.bool:
        # SDPA gives 0 for an empty row of a bool mask, and an average for one of floats.
        follows = follows & whole & (seen | hides(mask)).all()
    return torch.where(follows, torch.where(whole, _CAUSAL, _BY_RULE), _OTHER), real


class PromptMasks:
    """The masks of one prompt, or of tokens that follow a cache.

    Args:
        masks: How each is computed, `[batch or 1, 1, q_len, kv_len]` or without the first of these.
        args: Dynamo's inputs.
    """

    def __init__(self, masks: Sequence[Part], args: Sequence[Any]) -> None:
        self._masks, self._args = masks, args
        self._verdicts: dict[int, int] = {}
        self._made: dict[int, torch.Tensor] = {}

    def verdict(self, number: int, told: torch.Tensor) -> int:
        """Of the test of a mask. On CUDA the first layer that asks waits for it."""
        if number not in self._verdicts:
            self._verdicts[number] = int(told)
        return self._verdicts[number]

    def make(self, number: int) -> torch.Tensor:
        """A mask as the model has it."""
        if number not in self._made:
            (self._made[number],) = self._masks[number](self._args)
        return self._made[number]


def attend(
    masks: PromptMasks,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    verdict: torch.Tensor,
    real: torch.Tensor,
    number: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of the newest keys' queries.

    Args:
        masks: The call's.
        query: `[batch, num_heads, q_len, key_dim]`.
        key: `[batch, num_heads or fewer, kv_len, key_dim]`.
        value: `[batch, num_heads or fewer, kv_len, value_dim]`.
        verdict: See `check_mask_rule`.
        real: See `check_mask_rule`.
        number: Of the mask.
        scale: Factor on the scores.
        window: See `check_mask_rule`.

    Returns:
        `[batch, num_heads, q_len, value_dim]`, with the heads of a token side by side in memory.
    """
    told, q_len = masks.verdict(number, verdict), query.shape[2]
    causal = (
        told == _CAUSAL and q_len == key.shape[2]
    )  # SDPA's own has the first query see the first key alone
    if told != _OTHER and not causal and (q_len > _BLOCK or window is not None):
        return _by_blocks(query, key, value, real, scale, window)
    made = None if causal else masks.make(number)
    out = _sdpa(query, key, value, made, scale, is_causal=causal)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend with a block of queries at a time, to the keys that it reaches."""
    q_len, kv_len = query.shape[2], key.shape[2]
    before = kv_len - q_len
    out = empty_output(query, value)
    real = real.reshape(-1, 1, 1, kv_len)
    places = torch.arange(kv_len, dtype=torch.int32, device=query.device)
    size = _BLOCK if _reads_shared(query) else max(1, _BLOCK * key.shape[1] // query.shape[1])
    for start in range(before, kv_len, size):
        stop = min(start + size, kv_len)
        first = 0 if window is None else max(0, start + 1 - window)
        keys, queries = places[first:stop], places[start:stop, None]
        seen = (keys <= queries) & real[..., first:stop]
        if window is not None:
            seen &= keys > queries - window
        own = slice(start - before, stop - before)
        sides = (query[:, :, own], key[:, :, first:stop], value[:, :, first:stop])
        out[:, :, own] = _sdpa(*sides, seen, scale)
    return out


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> torch.Tensor:
    (batch, num_heads, q_len, _), heads = query.shape, key.shape[1]
    shares = num_heads != heads
    if shares and mask is not None and (not _reads_shared(query) or q_len * num_heads <= _FEW * heads):
        # Queries of a group, one behind the other: the kernels that take a mask read keys of each query's head.
        parts = []
        for queries, seen in zip(query.split(_BLOCK, 2), _rows_of(mask, q_len), strict=True):
            rows = queries.reshape(batch, heads, -1, query.shape[3])
            shown = torch.cat([seen] * (num_heads // heads), dim=-2)
            part = F.scaled_dot_product_attention(rows, key, value, shown, scale=scale)
            parts.append(part.reshape(batch, num_heads, queries.shape[2], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    if shares and query.device.type == "cuda" and not _flash_takes(query, value):
        key, value = (side.repeat_interleave(num_heads // heads, dim=1) for side in (key, value))
        shares = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=shares
    )


def _rows_of(mask: torch.Tensor, q_len: int) -> tuple[torch.Tensor, ...]:
    """A mask's rows, `_BLOCK` queries at a time."""
    return mask.expand(*mask.shape[:-2], q_len, mask.shape[-1]).split(_BLOCK, -2)


def _flash_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a GPU's FlashAttention does: of its kernels the one that reads keys which heads share."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    dims = query.shape[3] == value.shape[3] <= 256
    return half and dims and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _reads_shared(query: torch.Tensor) -> bool:
    """Whether SDPA reads keys that heads share where they lie, also with a mask."""
    return query.device.type == "cpu"


def empty_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The form of `attend`'s result, without numbers."""
    batch, num_heads, q_len, _ = query.shape
    return query.new_empty((batch, q_len, num_heads, value.shape[-1])).transpose(1, 2)
