"""The oracle's KV cache: one attention layer, C in full, C' computed from it, one dense softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from support.oracle_margin import margins
from support.oracle_quant import Indices, quantize_dequantize_key, quantize_dequantize_value
from torch import Tensor

if TYPE_CHECKING:
    from specache_fx.config import SpecacheConfig


@dataclass(frozen=True)
class ScoreForm:
    """What becomes of scaled products before the softmax.

    Attributes:
        softcap: They are bounded by it.
        slopes: [num_heads], ALiBi: times the distance from query to key, and subtracted.
        sinks: [num_heads], a column more that has no value.
    """

    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    def probabilities(self, products: Tensor, mask: Tensor) -> Tensor:
        """Of scaled products [batch, num_heads, 1, keys]; the newest key is the query's own token."""
        keys = products.shape[-1]
        if self.softcap is not None:
            products = self.softcap * (products / self.softcap).tanh()
        if self.slopes is not None:
            distance = torch.tensor([keys - 1 - key for key in range(keys)])
            products = products - self.slopes.to(products.dtype)[None, :, None, None] * distance
        products = products.masked_fill(~mask[:, None, None, :], float("-inf"))
        weights = (products - products.amax(-1, keepdim=True)).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            sinks = self.sinks.to(products.dtype)[None, :, None, None]
            total = total + (sinks - products.amax(-1, keepdim=True)).exp()
        return weights / total


PLAIN = ScoreForm()


class _Step(NamedTuple):
    """See `OracleCache.attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    staged: Indices | None
    scale: float
    form: ScoreForm


class OracleCache:
    """The KV cache of one attention layer: C in full; C' is computed from it when asked for.

    Args:
        config: bits, group_size, quantizer, residual_length, policy, aggregation, key_share, value_share.
        k: First pairs, [batch, num_kv_heads, tokens, head_dim].
        v: First pairs, [batch, num_kv_heads, tokens, value_dim].
        mask: bool [batch, tokens], True where a token is real; all by default.
        compute_dtype: Of attention; scores are always handed out as float32.
        window: Tokens that a query reaches, its own included; the cache is then exact. None for all.
        expand: Of cached k and v, the keys and values that attention reads; None where they are the same.
        resident: All of it stays at 16 bits.
    """

    def __init__(
        self,
        config: SpecacheConfig,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        compute_dtype: torch.dtype = torch.float32,
        window: int | None = None,
        expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        resident: bool = False,
    ) -> None:
        self.config, self.compute_dtype, self.window, self.expand = config, compute_dtype, window, expand
        self.is_exact = resident or window is not None
        self.k, self.v = k[:, :, :0], v[:, :, :0]
        self.key_mask = torch.ones(k.shape[0], 0, dtype=torch.bool, device=k.device)
        self.append(k, v, mask)

    @property
    def kv_len(self) -> int:
        return self.k.shape[2]

    def num_quantized_at(self, kv_len: int) -> int:
        """How many of `kv_len` tokens are quantised: whole groups, and never the newest `residual_length`."""
        count = 0
        while kv_len - (count + self.config.group_size) >= self.config.residual_length:
            count += self.config.group_size
        return count

    @property
    def sinks(self) -> list[list[int]]:
        """The first real tokens of each sequence, which stay at 16 bits: positions[batch]."""
        return [row.nonzero().flatten().tolist()[: self.config.sink_tokens] for row in self.key_mask]

    @property
    def selectable(self) -> Tensor:
        """True where a token may be prefetched, bool [batch, tokens]."""
        mask = self.key_mask.clone()
        for row, positions in enumerate(self.sinks):
            mask[row, positions] = False
        return mask

    @property
    def num_quantized(self) -> int:
        return 0 if self.is_exact else self.num_quantized_at(self.kv_len)

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
        """Add pairs at 16 bits; what falls out of the window by that is low-bit from now on."""
        if mask is None:
            mask = self.key_mask.new_ones(k.shape[0], k.shape[2])
        self.k, self.v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.key_mask = torch.cat((self.key_mask, mask.bool()), dim=1)

    def crop(self, kv_len: int) -> None:
        """Forget all but the oldest `kv_len` tokens; the window reaches back into C for its 16-bit pairs."""
        if self.config.policy == "kivi" and self.num_quantized_at(kv_len) < self.num_quantized:
            raise NotImplementedError("kivi has no 16-bit pairs to go back to: its crop is not defined here")
        self.k, self.v, self.key_mask = (
            self.k[:, :, :kv_len],
            self.v[:, :, :kv_len],
            self.key_mask[:, :kv_len],
        )

    def low_bit(self) -> tuple[Tensor, Tensor]:
        """(K', V') of the quantised positions, [batch, num_kv_heads, num_quantized, ...]."""
        config, count = self.config, self.num_quantized
        how = config.bits, config.group_size, config.quantizer
        ahead = config.residual_length if count else 0
        return (
            quantize_dequantize_key(self.k[:, :, : count + ahead], *how, self.key_mask, ahead),
            quantize_dequantize_value(self.v[:, :, :count], *how, self.key_mask),
        )

    def device_pairs(self, staged: Indices | None = None) -> tuple[Tensor, Tensor]:
        """K and V as decoding sees them: C' with the staged pairs and the sinks at 16 bits, then the window."""
        k_low, v_low = self.low_bit()
        count = self.num_quantized
        k, v = (
            torch.cat((k_low, self.k[:, :, count:]), dim=2),
            torch.cat((v_low, self.v[:, :, count:]), dim=2),
        )
        for batch, heads in enumerate(staged or []):
            for head, positions in enumerate(heads):
                for position in positions:
                    assert position < count
                    k[batch, head, position] = self.k[batch, head, position]
                    v[batch, head, position] = self.v[batch, head, position]
        for row, positions in enumerate(self.sinks):
            k[row, :, positions], v[row, :, positions] = self.k[row, :, positions], self.v[row, :, positions]
        return k, v

    def has_values(self, staged: Indices | None = None) -> Tensor:
        """Whose values attention adds up, bool [batch, num_kv_heads, tokens].

        Policy "kcache" has the keys of all tokens on the device and the values of the window; those of `staged` come.
        """
        there = torch.ones(self.k.shape[:3], dtype=torch.bool)
        if self.config.policy != "kcache":
            return there
        there[:, :, : self.num_quantized] = False
        for batch, heads in enumerate(staged or []):
            for head, positions in enumerate(heads):
                there[batch, head, positions] = True
        return there

    def attend(
        self,
        q_lanes: Tensor,
        k_lanes: Tensor,
        v_lanes: Tensor,
        staged: Indices | None,
        scale: float,
        form: ScoreForm = PLAIN,
        whole: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One decode step: the cache, then lane 0's own pair, then (lane 1 alone) lane 1's own.

        Paper: SpeCache Alg. 2, Alg. 3.

        Args:
            q_lanes: [lanes, batch, num_heads, 1, head_dim], one or two lanes.
            k_lanes: Own pairs, [lanes, batch, num_kv_heads, 1, head_dim].
            v_lanes: Own pairs, [lanes, batch, num_kv_heads, 1, value_dim].
            staged: K_t, the positions that are at 16 bits; None for none.
            scale: Of the logits.
            form: What else is done to them.
            whole: Return scores of the window and of lane 0's own pair too: [..., kv_len + 1].

        Returns:
            out [lanes, batch, num_heads, 1, value_dim], and scores, float32
            [lanes, batch, num_kv_heads, num_quantized]: probabilities of the quantised positions, mean or maximum
            (`aggregation`) over the query heads that share the kv head.
        """
        step, read = _Step(q_lanes, k_lanes, v_lanes, staged, scale, form), None
        if self.config.key_share is not None and self.config.bits != 16 and not self.is_exact:
            read = self._read_in_the_step(step)
        return self._attend(step, whole, read)

    def _read_in_the_step(self, step: _Step) -> tuple[Tensor, Tensor]:
        """The pairs with a large share of the output token's attention, bool [batch, num_kv_heads, kv_len] twice.

        Those above `key_share` get their keys, and those above `value_share` by these their values.
        """
        count = self.num_quantized
        free = torch.zeros(self.k.shape[:3], dtype=torch.bool)
        free[:, :, :count] = self.selectable[:, None, :count]
        for batch, heads in enumerate(step.staged or []):
            for head, positions in enumerate(heads):
                free[batch, head, positions] = False
        lanes = {"q": step.q[:1], "k": step.k[:1], "v": step.v[:1]}
        output, read = step._replace(**lanes), [torch.zeros_like(free)] * 2
        for side, share in enumerate((self.config.key_share, self.config.value_share)):
            _, scores = self._attend(output, True, (read[0], read[1]), margin=side == 0)
            free = free & (scores[0, ..., : self.kv_len] > share)
            read[side] = free
        return read[0], read[1]

    def _attend(
        self, step: _Step, whole: bool, read: tuple[Tensor, Tensor] | None, margin: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `attend`, with exact pairs of `read`; with `margin` scores are the most that keys may give."""
        q_lanes, k_lanes, v_lanes, staged, scale, form = step
        k, v = self.device_pairs(staged)
        there = self.has_values(staged)
        num_kv_heads, num_heads = k.shape[1], q_lanes.shape[2]
        own_mask = self.key_mask.new_ones(k.shape[0], 1)
        outs, scores = [], []
        for lane in range(q_lanes.shape[0]):
            lane_k, lane_v = (
                torch.cat([k, *k_lanes[: lane + 1]], 2),
                torch.cat([v, *v_lanes[: lane + 1]], 2),
            )
            exact = [
                torch.cat([side, *own[: lane + 1]], 2) for side, own in ((self.k, k_lanes), (self.v, v_lanes))
            ]
            if self.expand is not None:
                lane_k, lane_v = self.expand(lane_k, lane_v)
                exact = list(self.expand(exact[0], exact[1]))
            if read is not None:
                lane_k, lane_v = (
                    torch.where(_over(mask, full, lane + 1), full, low)
                    for mask, full, low in zip(read, exact, (lane_k, lane_v), strict=True)
                )
            lane_k, lane_v = lane_k.to(self.compute_dtype), lane_v.to(self.compute_dtype)
            lane_mask = torch.cat([self.key_mask] + [own_mask] * (lane + 1), dim=1)
            if self.window is not None:
                lane_mask[:, : max(0, lane_mask.shape[1] - self.window)] = False
            lane_k = lane_k.repeat_interleave(num_heads // lane_k.shape[1], dim=1)
            lane_v = lane_v.repeat_interleave(num_heads // lane_v.shape[1], dim=1)
            logits = q_lanes[lane].to(self.compute_dtype) @ lane_k.transpose(-1, -2) * scale
            probabilities = form.probabilities(logits, lane_mask)
            own = there.new_ones(*there.shape[:2], lane + 1)
            counted = torch.cat((there, own), dim=2).repeat_interleave(num_heads // num_kv_heads, dim=1)
            outs.append((probabilities * counted[:, :, None] @ lane_v).to(q_lanes.dtype))
            shared = probabilities[:, :, 0].unflatten(1, (num_kv_heads, -1))
            is_latent = self.expand is not None and self.expand(k, v)[0] is not k
            if margin and self.num_quantized and not is_latent:
                query = q_lanes[lane][:, :, 0].unflatten(1, (num_kv_heads, -1)) * scale
                count, ahead = self.num_quantized, self.config.residual_length
                may_be = margins(self.config, query, self.k[:, :, : count + ahead], self.key_mask, ahead)
                shared = torch.cat((shared[..., :count] * may_be, shared[..., count:]), dim=-1)
            by_kv_head = shared.amax(2) if self.config.aggregation == "max" else shared.mean(2)
            scores.append(by_kv_head[..., : self.kv_len + 1 if whole else self.num_quantized].float())
        return torch.stack(outs), torch.stack(scores)


def _over(mask: Tensor, pairs: Tensor, own: int) -> Tensor:
    """Bool [batch, num_kv_heads, tokens] for keys or values of as many heads, and `own` pairs that it is not of."""
    wide = mask.repeat_interleave(pairs.shape[1] // mask.shape[1], dim=1)
    return torch.nn.functional.pad(wide, (0, own))[..., None]
