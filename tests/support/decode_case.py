"""Decode attention cases for kernels: inputs drawn from a seed, the dense answer in float64, and what may differ.

The answer knows the oracle's quantiser and nothing of the runtime: one dense softmax over the dequantised keys with the
staged ones replaced, the window, and the lanes' own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from support.oracle_quant import quantize_dequantize_key, quantize_dequantize_value
from torch import Tensor

from specache_fx.config import SpecacheConfig
from specache_fx.runtime.kernels import DecodeInputs
from specache_fx.runtime.quant import make_quantizer


@dataclass(frozen=True)
class CaseShape:
    """What a case looks like; `forms` are names of "mask", "visible", "bias", "softcap", "sinks", "hidden_row"."""

    lanes: int = 2
    batch: int = 2
    num_kv_heads: int = 2
    num_kv_groups: int = 2
    key_dim: int = 16
    value_dim: int = 16
    bits: int = 2
    group_size: int = 8
    quantizer: str = "kivi"
    groups: int = 9
    window_len: int = 5
    top_k: int = 4
    independent: bool = False
    dtype: torch.dtype = torch.float32
    forms: frozenset[str] = field(default_factory=frozenset)
    softcap: float = 3.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """The dense answer in float64, and what a kernel of the KV dtype may differ by."""

    out: Tensor
    scores: Tensor
    out_budget: Tensor
    scores_budget: Tensor


class DecodeCase:
    """Numbers of one case; `inputs` for a kernel, `answer` by definition."""

    def __init__(self, shape: CaseShape) -> None:
        self.shape = s = shape
        self._generator = torch.Generator().manual_seed(s.seed)
        self.num_quantized = s.groups * s.group_size
        self.kv_len = self.num_quantized + s.window_len
        heads = (s.batch, s.num_kv_heads)
        # Channels far from zero, and a few large ones: what makes keys hard to quantise.
        offset = 3 * self._random(1, s.num_kv_heads, 1, s.key_dim)
        self.key = self._random(*heads, self.kv_len, s.key_dim) + offset
        self.value = self._random(*heads, self.kv_len, s.value_dim)
        lanes = (s.lanes, *heads, 1)
        self.own_key, self.own_value = self._random(*lanes, s.key_dim), self._random(*lanes, s.value_dim)
        num_heads = s.num_kv_heads * s.num_kv_groups
        self.query = self._random(s.lanes, s.batch, num_heads, 1, s.key_dim)
        self.scale = 1 / math.sqrt(s.key_dim)
        self.staged = self._staged()
        self.softcap = s.softcap if "softcap" in s.forms else None
        self.sinks = self._random(num_heads) if "sinks" in s.forms else None
        self.mask = self._coins(s.batch, self.kv_len) if "mask" in s.forms else None
        if self.mask is not None and "hidden_row" in s.forms:
            self.mask[0] = False
        columns = self.kv_len + s.lanes
        self.visible = self._coins(s.lanes, s.batch, columns) if "visible" in s.forms else None
        if self.visible is not None and "hidden_row" in s.forms:
            self.visible[0, 0] = False
        self.bias: Tensor | None = None
        if "bias" in s.forms:
            shape_of_bias = (s.batch, num_heads) if s.seed % 2 else (1, num_heads if s.seed % 4 else 1)
            self.bias = self._random(s.lanes, *shape_of_bias, columns)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.shape.dtype)

    def _coins(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) < 0.7

    def _staged(self) -> Tensor | None:
        s = self.shape
        if not s.top_k or not self.num_quantized:
            return None
        rows = s.batch * s.num_kv_heads
        order = torch.rand(rows, self.num_quantized, generator=self._generator).argsort(dim=1)
        chosen = torch.full((rows, s.top_k), -1, dtype=torch.int32)
        count = min(s.top_k, self.num_quantized)
        chosen[:, :count] = order[:, :count].to(torch.int32)
        chosen[:, ::3] = -1  # empty slots among the others
        return chosen.view(s.batch, s.num_kv_heads, s.top_k)

    def inputs(self, device: torch.device) -> DecodeInputs:
        """For a kernel. Tensors have the strides that a session's have: parts of longer buffers."""
        s, n = self.shape, self.num_quantized
        quantizer = make_quantizer(
            SpecacheConfig(bits=s.bits, group_size=s.group_size, quantizer=s.quantizer)
        )
        rows = None
        if self.staged is not None:
            at = self.staged.clamp(min=0).long()[..., None]
            pair = torch.cat([self.key, self.value], 3)
            rows = pair.gather(2, at.expand(*at.shape[:3], pair.shape[3])).to(device)
            rows[self.staged < 0] = 7.0  # means nothing

        def part(x: Tensor) -> Tensor:
            longer = x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), 100).to(device)
            longer[:, :, : x.shape[2]] = x.to(device)
            return longer[:, :, : x.shape[2]]

        planes = [
            tuple(part(plane) for plane in quantize(side[:, :, :n])) if n else ()
            for quantize, side in ((quantizer.quantize_key, self.key), (quantizer.quantize_value, self.value))
        ]
        moved: dict[str, Any] = {
            name: None if x is None else x.to(device)
            for name, x in {
                "query": self.query,
                "key": self.own_key,
                "value": self.own_value,
                "staged_indices": self.staged,
                "key_mask": self.mask,
                "visible": self.visible,
                "bias": self.bias,
                "sinks": self.sinks,
            }.items()
        }
        return DecodeInputs(
            quantizer=quantizer,
            key_planes=planes[0],
            value_planes=planes[1],
            num_quantized=n,
            window_rows=(part(self.key[:, :, n:]), part(self.value[:, :, n:])),
            window_len=self.kv_len - n,
            staged_rows=rows,
            scale=self.scale,
            independent_lanes=s.independent,
            softcap=self.softcap,
            **moved,
        )

    def answer(self, fused: bool = False) -> Answer:
        """One softmax over everything, in float64.

        Args:
            fused: Code times scale plus zero may be rounded once, where the definition rounds twice: a key then may be
                its neighbour of the KV dtype.
        """
        s, n = self.shape, self.num_quantized
        low = (
            quantize_dequantize_key(self.key[:, :, :n], s.bits, s.group_size, s.quantizer),
            quantize_dequantize_value(self.value[:, :, :n], s.bits, s.group_size, s.quantizer),
        )
        keys, values = (
            torch.cat([low_bit, whole[:, :, n:]], 2).double()
            for low_bit, whole in zip(low, (self.key, self.value), strict=True)
        )
        if self.staged is not None:
            for b, h, slot in (self.staged >= 0).nonzero().tolist():
                token = int(self.staged[b, h, slot])
                keys[b, h, token], values[b, h, token] = self.key[b, h, token], self.value[b, h, token]
        unit = torch.finfo(s.dtype).eps / 2
        out = torch.zeros(s.lanes, s.batch, s.num_kv_heads * s.num_kv_groups, 1, s.value_dim).double()
        out_budget = torch.zeros_like(out)
        scores = torch.zeros(s.lanes, s.batch, s.num_kv_heads, self.kv_len + 1).double()
        scores_budget = torch.zeros_like(scores)
        for lane in range(s.lanes):
            own = [lane] if s.independent else list(range(lane + 1))
            columns = [*range(self.kv_len), *(self.kv_len + other for other in range(s.lanes))]
            for b in range(s.batch):
                seen = torch.tensor([c < self.kv_len or c - self.kv_len in own for c in columns])
                if self.visible is not None:
                    seen = self.visible[lane, b].clone()
                if self.mask is not None:
                    seen[: self.kv_len] &= self.mask[b]
                for head in range(out.shape[2]):
                    h = head // s.num_kv_groups
                    k = torch.cat([keys[b, h], self.own_key[:, b, h, 0].double()])
                    v = torch.cat([values[b, h], self.own_value[:, b, h, 0].double()])
                    terms = k * self.query[lane, b, head, 0].double() * self.scale
                    products = terms.sum(1)
                    # Sums of float32 products, and float32's exp.
                    slack = 64 * 2**-24 * (1 + terms.abs().sum(1)) + fused * unit * terms.abs().amax(1)
                    rotated = s.quantizer == "turboquant"
                    if rotated:  # rounded in the rotated basis there, and in the other one here
                        length = self.query[lane, b, head, 0].double().norm() * self.scale
                        slack = slack + 2 * unit * length * k.norm(dim=1)
                    if self.softcap is not None:
                        products = self.softcap * torch.tanh(products / self.softcap)
                    if self.bias is not None:
                        row = self.bias[lane, b % self.bias.shape[1], head % self.bias.shape[2]].double()
                        products = products + row
                        slack = slack + 2**-22 * row.abs()
                    products = products.masked_fill(~seen, -math.inf)
                    extra = [] if self.sinks is None else [self.sinks[head].double()]
                    whole = torch.logsumexp(torch.cat([products, torch.tensor(extra).double()]), 0)
                    p = torch.zeros_like(products) if whole == -math.inf else (products - whole).exp()
                    relative = slack[seen].max() * 2 if seen.any() else torch.zeros(()).double()
                    out[lane, b, head, 0] = p @ v
                    # Probabilities are rounded before they meet the values, a value may be its neighbour, and the
                    # result is rounded.
                    out_budget[lane, b, head, 0] = (3 * unit + relative) * (p @ v.abs()) + 1e-7
                    out_budget[lane, b, head, 0] += rotated * 2 * unit * (p @ v.norm(dim=1))
                    scores[lane, b, h] += p[: self.kv_len + 1] / s.num_kv_groups
                    scores_budget[lane, b, h] += p[: self.kv_len + 1] * relative / s.num_kv_groups + 1e-9
                if self.mask is not None:
                    scores[lane, b][:, : self.kv_len][:, ~self.mask[b]] = -1
                if self.visible is not None:
                    scores[lane, b][:, : self.kv_len][:, ~self.visible[lane, b, : self.kv_len]] = -1
        return Answer(out, scores, out_budget, scores_budget)

    def check(self, out: Tensor, scores: Tensor) -> None:
        """Assert that a kernel's results are within the budget."""
        answer = self.answer(fused=out.is_cuda)
        assert out.shape == answer.out.shape and out.dtype == self.shape.dtype
        assert scores.shape == answer.scores.shape and scores.dtype == torch.float32
        for got, wanted, budget in (
            (out, answer.out, answer.out_budget),
            (scores, answer.scores, answer.scores_budget),
        ):
            excess = ((got.cpu().double() - wanted).abs() / budget).max()
            assert excess <= 1, f"{float(excess):.2f} times the budget: {self.shape}"
