"""A decoder with random weights whose cache can be anything: the same step around every way of keeping the cache.

It is written out (no `torch.compile`), so that a run starts at once and Python's share is the same for all methods.
`model.py` measures what users call.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
import torch.nn.functional as F

from benchmarks.gpu.shapes import ModelShape


class Cache(Protocol):
    """A way of keeping keys and values."""

    lanes: int

    def begin(self) -> None:
        """A step begins."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with `[lanes, batch, num_heads, 1, head_dim]`, and keep lane 0's pair."""

    def end(self) -> None:
        """A step is through."""

    def num_quantized(self) -> int:
        """Tokens in codes."""
        ...

    def close(self) -> None:
        """Give the memory back."""


class Decoder:
    """Random weights of a shape, made layer by layer on the device."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        s = shape
        qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        self.embedding = self._weight(s.vocab, s.hidden)
        self.head = self._weight(s.vocab, s.hidden)
        self.layers = [
            (
                self._weight(qkv, s.hidden),
                self._weight(s.hidden, s.num_heads * s.head_dim),
                self._weight(2 * s.intermediate, s.hidden),
                self._weight(s.hidden, s.intermediate),
            )
            for _ in range(s.num_layers)
        ]

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return weight.normal_(std=0.02)

    def step(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Decode one token of each sequence.

        Args:
            tokens: int64 `[lanes, batch]`.
            cache: Holds what came before.

        Returns:
            The next tokens, `[lanes, batch]`.
        """
        s, (lanes, batch) = self.shape, tokens.shape
        x = F.embedding(tokens, self.embedding)
        cache.begin()
        for layer, (qkv, out, gate_up, down) in enumerate(self.layers):
            heads = F.linear(F.rms_norm(x, (s.hidden,)), qkv).view(lanes, batch, -1, 1, s.head_dim)
            query, key, value = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=2)
            attended = cache.attend(layer, query, key, value).reshape(lanes, batch, -1)
            x = x + F.linear(attended, out)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,)), gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down)
        cache.end()
        return F.linear(F.rms_norm(x, (s.hidden,)), self.head).argmax(-1)


def sync(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(decoder: Decoder, cache: Cache, batch: int, warm_up: int, steps: int) -> dict[str, float]:
    """Decode, and give the milliseconds of a step: median, p10, p90; those in which a group filled apart."""
    tokens = torch.randint(0, decoder.shape.vocab, (cache.lanes, batch), device=decoder.device)
    seconds, filling = [], []
    with torch.inference_mode():
        for number in range(warm_up + steps):
            sync(decoder.device)
            quantized = cache.num_quantized()
            start = time.perf_counter()
            tokens = decoder.step(tokens, cache)
            sync(decoder.device)
            if number >= warm_up:
                where = seconds if quantized == cache.num_quantized() else filling
                where.append(time.perf_counter() - start)
    seconds.sort()
    at = [seconds[min(int(share * len(seconds)), len(seconds) - 1)] for share in (0.5, 0.1, 0.9)]
    found = dict(zip(("ms_median", "ms_p10", "ms_p90"), (1000 * s for s in at), strict=True))
    if filling:
        found |= {"ms_filling": 1000 * sum(filling) / len(filling), "steps_filling": len(filling)}
    return found
