"""The reference kernel: plain ATen, float32, one softmax over all tiers. It defines correctness."""

from __future__ import annotations

import torch

from specache_fx.runtime.kernels.base import DecodeInputs, Kernel
from specache_fx.runtime.select import AGGREGATIONS

MOST_DEVIATION = 20.0  # of a score's error: kMostDeviation of same_step.h


class ReferenceKernel(Kernel):
    """Dequantises the whole low-bit copy, then attends densely. Runs on every device."""

    name = "reference"

    def _attend(self, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Paper: SpeCache eq. 1, Algorithm 3."""
        lanes, batch, num_heads, _, key_dim = inputs.query.shape
        compute = torch.promote_types(inputs.query.dtype, torch.float32)
        keys, values, own_key, own_value = (
            side.to(compute) for side in _pairs(inputs, *_stored_pairs(inputs))
        )
        num_kv_heads, value_dim = keys.shape[1], values.shape[3]

        query = inputs.query.reshape(lanes, batch, num_kv_heads, -1, key_dim).to(compute)
        stored = torch.einsum("lbhgd,bhnd->lbhgn", query, keys) * inputs.scale
        own = torch.einsum("lbhgd,mbhd->lbhgm", query, own_key) * inputs.scale
        probs = probabilities(inputs, stored, own)
        if inputs.originals is not None and inputs.num_quantized:
            exact_keys, exact_values = (
                side.to(compute) for side in _pairs(inputs, *_original_pairs(inputs))[:2]
            )
            exact = torch.einsum("lbhgd,bhnd->lbhgn", query, exact_keys) * inputs.scale
            may_be = probs[..., : keys.shape[2]] * _margins(inputs, query)
            chosen = _chosen(inputs, may_be, inputs.originals.key_share)
            stored = torch.where(_by_head(chosen, num_kv_heads)[:, :, None], exact, stored)
            probs = probabilities(inputs, stored, own)
            shares = probs[..., : keys.shape[2]]
            whole = chosen & _chosen(inputs, shares, inputs.originals.value_share)
            values = torch.where(_by_head(whole, num_kv_heads)[..., None], exact_values, values)
            num_read = inputs.originals.num_read
            num_read.add_(torch.stack([chosen.sum(), whole.sum()]).to(num_read.device))
        stored_probs, own_probs = probs.split([keys.shape[2], lanes], dim=-1)
        out = torch.einsum("lbhgn,bhnd->lbhgd", stored_probs, values)
        out = out + torch.einsum("lbhgm,mbhd->lbhgd", own_probs, own_value)

        out = out.reshape(lanes, batch, num_heads, 1, value_dim).to(inputs.query.dtype).contiguous()
        return out, selection_scores(inputs, probs)


def probabilities(inputs: DecodeInputs, stored: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Softmax of scaled products, without the sinks' share.

    Args:
        inputs: Has softcap, biases and hidden keys.
        stored: Of the stored tokens, `[lanes, batch, num_kv_heads, num_kv_groups, tokens]`.
        own: Of the lanes' own pairs, `[lanes, batch, num_kv_heads, num_kv_groups, lanes]`.

    Returns:
        `[lanes, batch, num_kv_heads, num_kv_groups, tokens + lanes]`.
    """
    lanes, _, num_kv_heads, _, tokens = stored.shape
    if inputs.softcap is not None:
        stored, own = (inputs.softcap * torch.tanh(s / inputs.softcap) for s in (stored, own))
    if inputs.bias is not None:
        bias = _by_kv_head(inputs.bias, num_kv_heads).to(stored.dtype)
        stored, own = stored + bias[..., :tokens], own + bias[..., tokens:]
    if inputs.key_mask is not None:
        stored = stored.masked_fill(~inputs.key_mask[None, :, None, None, :], -torch.inf)
    seen = torch.eye(lanes, dtype=torch.bool, device=own.device)
    if not inputs.independent_lanes:
        seen = torch.ones_like(seen).tril()
    seen = seen[:, None, :]
    if inputs.visible is not None:
        stored_seen, seen = inputs.visible.split([tokens, lanes], dim=-1)
        stored = stored.masked_fill(~stored_seen[:, :, None, None, :], -torch.inf)
    own = own.masked_fill(~seen[:, :, None, None, :], -torch.inf)
    columns = [stored, own]
    if inputs.sinks is not None:
        sinks = inputs.sinks.reshape(num_kv_heads, -1, 1).to(stored.dtype)
        columns.append(sinks.expand(*stored.shape[:2], *sinks.shape))
    probs: torch.Tensor = torch.ops.aten._safe_softmax(
        torch.cat(columns, dim=-1), -1
    )  # all hidden: 0, as SDPA
    return probs[..., : tokens + lanes]


def _chosen(inputs: DecodeInputs, probs: torch.Tensor, share: float) -> torch.Tensor:
    """The pairs of which lane 0 has a larger share, of those that are in codes alone.

    Args:
        inputs: Say which are staged, and how heads share a cached row.
        probs: `[lanes, batch, num_kv_heads, num_kv_groups, stored tokens]`.
        share: The share.

    Returns:
        bool `[batch, num_kv_heads of the cache, tokens]`.
    """
    shares = _joined(inputs, probs[:1])[0]
    shares[..., inputs.num_quantized :] = 0
    return without_staged(inputs, shares) > share


def without_staged(inputs: DecodeInputs, shares: torch.Tensor) -> torch.Tensor:
    """`[batch, num_kv_heads, tokens]`, with 0 for those that are staged."""
    if inputs.staged_indices is None:
        return shares
    shares = torch.nn.functional.pad(shares, (0, 1))  # where empty slots go
    return shares.scatter(-1, inputs.staged_indices.long() % shares.shape[-1], 0.0)[..., :-1]


def _margins(inputs: DecodeInputs, query: torch.Tensor) -> torch.Tensor:
    """What shares by codes may be multiplied with: e to the standard deviation of the score's error.

    Args:
        inputs: Have the codes.
        query: `[lanes, batch, num_kv_heads, num_kv_groups, key_dim]`.

    Returns:
        `[1, batch, num_kv_heads, num_kv_groups, stored tokens]`; 1 for the window, and where the error is unknown.
    """
    margins = query.new_ones(1, *query.shape[1:4], inputs.num_quantized + inputs.window_len)
    if (deviation := score_deviation(inputs, query[0])) is not None:
        margins[0, ..., : inputs.num_quantized] = deviation.exp()
    return margins


def score_deviation(inputs: DecodeInputs, query: torch.Tensor) -> torch.Tensor | None:
    """`Quantizer.score_deviation` of the step's keys, bounded.

    Args:
        inputs: Have the codes.
        query: Lane 0's, at least float32 `[batch, num_kv_heads, num_kv_groups, key_dim]`.

    Returns:
        `[batch, num_kv_heads, num_kv_groups, num_quantized]`; None where it is unknown.
    """
    if inputs.expand is not None:
        return None
    deviation = inputs.quantizer.score_deviation(inputs.key_planes, query * inputs.scale)
    return None if deviation is None else deviation.clamp(max=MOST_DEVIATION)


def _by_head(chosen: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`[batch, num_kv_heads of the cache, tokens]` by the kv heads that attention reads: of a latent there are more."""
    return chosen.repeat_interleave(num_kv_heads // chosen.shape[1], dim=1)


def _joined(inputs: DecodeInputs, probs: torch.Tensor) -> torch.Tensor:
    """`[lanes, batch, num_kv_heads, num_kv_groups, tokens]` of the heads that share a cached row as one, float32.

    One kv head's group, or all heads that read a latent.
    """
    shared = probs.flatten(2, 3).unflatten(2, (inputs.key.shape[2], -1))
    return AGGREGATIONS[inputs.aggregation].of_heads(shared, 3).to(torch.float32)


def selection_scores(inputs: DecodeInputs, probs: torch.Tensor) -> torch.Tensor:
    """The selection scores of `Kernel.attention` from the result of `probabilities`."""
    lanes, tokens = inputs.query.shape[0], probs.shape[-1] - inputs.query.shape[0]
    scores = _joined(inputs, probs[lanes - inputs.num_scored :, ..., : tokens + 1])
    if inputs.key_mask is not None:
        scores[..., :-1].masked_fill_(~inputs.key_mask[None, :, None, :], -1.0)
    if inputs.visible is not None:
        seen = inputs.visible[lanes - inputs.num_scored :, :, None, :tokens]
        scores[..., :-1].masked_fill_(~seen, -1.0)
    return scores


def _by_kv_head(bias: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`[lanes, batch or 1, num_heads or 1, columns]` with the heads of a group in a dimension of their own."""
    return bias.unsqueeze(3) if bias.shape[2] == 1 else bias.unflatten(2, (num_kv_heads, -1))


def _pairs(
    inputs: DecodeInputs, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of stored ones, what attention reads: `[batch, num_kv_heads, kv_len, dim]` twice, and the lanes' own."""
    own_key, own_value = inputs.key.squeeze(3), inputs.value.squeeze(3)
    if inputs.expand is None:
        return keys, values, own_key, own_value
    lanes, tokens = own_key.shape[0], keys.shape[2]
    own = (side.permute(1, 2, 0, 3) for side in (own_key, own_value))
    keys, values = inputs.expand(
        *(torch.cat(parts, dim=2) for parts in zip((keys, values), own, strict=True))
    )
    (keys, own_key), (values, own_value) = (side.split([tokens, lanes], dim=2) for side in (keys, values))
    return keys, values, own_key.permute(2, 0, 1, 3), own_value.permute(2, 0, 1, 3)


def _stored_pairs(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """C' with the staged pairs in place, then the window: `[batch, num_kv_heads, kv_len, dim]` each."""
    window_key, window_value = inputs.window_key, inputs.window_value
    key_dim, value_dim = inputs.key.shape[4], inputs.value.shape[4]
    if not inputs.num_quantized:
        return window_key, window_value
    low_key = inputs.quantizer.dequantize_key(inputs.key_planes, key_dim, window_key.dtype)
    low_value = inputs.quantizer.dequantize_value(inputs.value_planes, value_dim, window_key.dtype)
    if inputs.staged_rows is not None and inputs.staged_indices is not None:
        if inputs.staged_rows.shape[3] > value_dim:
            low_key = _replaced(low_key, inputs.staged_rows[..., :key_dim], inputs.staged_indices)
        low_value = _replaced(low_value, inputs.staged_rows[..., -value_dim:], inputs.staged_indices)
    return torch.cat([low_key, window_key], dim=2), torch.cat([low_value, window_value], dim=2)


def _original_pairs(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """C, then the window."""
    assert inputs.originals is not None
    sides = inputs.originals.read(0, inputs.num_quantized)
    windows = inputs.window_key, inputs.window_value
    key, value = (
        torch.cat([side.to(rows.device), rows], dim=2) for side, rows in zip(sides, windows, strict=True)
    )
    return key, value


def _replaced(low_bit: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`low_bit` with the rows of `indices` replaced; an empty slot (-1) lands in a row that is cut off again."""
    batch, heads, tokens, dim = low_bit.shape
    padded = torch.cat([low_bit, low_bit.new_empty(batch, heads, 1, dim)], dim=2)
    target = torch.where(indices < 0, tokens, indices).to(torch.int64)
    return padded.scatter_(2, target[..., None].expand(-1, -1, -1, dim), rows)[:, :, :tokens]
