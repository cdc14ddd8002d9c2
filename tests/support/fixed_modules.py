"""A small decoder that keeps its cache in buffers of fixed length, written in place in one of several spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 97, 64, 4, 2, 16


def index_put(buffer: Tensor, position: Tensor, new: Tensor) -> Tensor:
    buffer[:, :, position] = new
    return buffer


def index_copy(buffer: Tensor, position: Tensor, new: Tensor) -> Tensor:
    return buffer.index_copy_(-2, position, new)


def tokens_first(buffer: Tensor, position: Tensor, new: Tensor) -> Tensor:
    buffer[:, position] = new.transpose(1, 2)
    return buffer.transpose(1, 2)


def sliced(buffer: Tensor, start: int, new: Tensor) -> Tensor:
    buffer[:, :, start : start + new.shape[2]] = new
    return buffer


def narrowed(buffer: Tensor, start: int, new: Tensor) -> Tensor:
    buffer.narrow(2, start, new.shape[2]).copy_(new)
    return buffer


def sliced_to_the_end(buffer: Tensor, start: int, new: Tensor) -> Tensor:
    """What is read ends with this call's tokens."""
    buffer[:, :, start : start + new.shape[2]] = new
    return buffer[:, :, : start + new.shape[2]]


def repeated_before_swapped(buffer: Tensor, start: int, new: Tensor) -> Tensor:
    """Tokens first; heads are repeated as they are kept, and swapped with tokens behind that."""
    end = start + new.shape[2]
    buffer[:, start:end] = new.transpose(1, 2)
    return buffer[:, :end].repeat_interleave(HEADS // KV_HEADS, dim=2).transpose(1, 2)


def sliced_for_groups(buffer: Tensor, start: int, new: Tensor) -> Tensor:
    """Query heads of a KV head share it: nothing is repeated."""
    return sliced(buffer, start, new).unsqueeze(2)


def index_copy_of_rows(buffer: Tensor, position: Tensor, new: Tensor) -> Tensor:
    """A batch of fewer rows than the buffer has."""
    return buffer[: new.shape[0]].index_copy_(-2, position, new)


def sliced_of_rows(buffer: Tensor, start: int, new: Tensor) -> Tensor:
    """The same with tokens first; what is read ends with this call's tokens."""
    batch, end = new.shape[0], start + new.shape[2]
    buffer[:batch, start:end] = new.transpose(1, 2)
    return buffer[:batch, :end].transpose(1, 2)


TOKENS_FIRST = tokens_first, repeated_before_swapped, sliced_of_rows
BY_TENSOR: dict[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (index_put, index_copy, tokens_first)
}
BY_NUMBER: dict[str, Callable[..., Tensor]] = {
    each.__name__: each
    for each in (sliced, narrowed, sliced_to_the_end, sliced_for_groups, repeated_before_swapped)
}
OF_ROWS: dict[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (index_copy_of_rows, sliced_of_rows)
}


class FixedLayer(nn.Module):
    def __init__(self, append: Callable[..., Tensor], batch: int, capacity: int) -> None:
        super().__init__()
        self.append = append
        self.q, self.o = nn.Linear(HIDDEN, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_DIM)
        shape = (batch, KV_HEADS, capacity, HEAD_DIM)
        if append in TOKENS_FIRST:
            shape = (batch, capacity, KV_HEADS, HEAD_DIM)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, where: Any, mask: Tensor | None) -> Tensor:
        batch, n, _ = x.shape
        q = self.q(x).view(batch, n, HEADS, HEAD_DIM).transpose(1, 2)
        new = self.kv(x).view(batch, n, 2 * KV_HEADS, HEAD_DIM).transpose(1, 2).chunk(2, 1)
        keys, values = (
            self.append(buffer, where, each)
            for buffer, each in zip((self.keys, self.values), new, strict=True)
        )
        if keys.dim() == 5:
            q = q.unflatten(1, (KV_HEADS, -1))
        elif keys.shape[1] < HEADS:
            keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (keys, values))
        mask = None if mask is None else mask[..., : keys.shape[-2]]
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None and n > 1
        )
        return x + self.o(out.view(batch, HEADS, n, HEAD_DIM).transpose(1, 2).reshape(batch, n, -1))


class FixedDecoder(nn.Module):
    """Args: how it writes, of `BY_TENSOR`, `BY_NUMBER` or `OF_ROWS`; without masks, a prompt comes in one call."""

    def __init__(
        self, spelling: str, batch: int = 2, capacity: int = 160, num_layers: int = 1, masked: bool = True
    ) -> None:
        super().__init__()
        self.masked = masked
        append = (BY_TENSOR | BY_NUMBER | OF_ROWS)[spelling]
        self.by_number = append in (*BY_NUMBER.values(), sliced_of_rows)
        self.tokens, self.places = nn.Embedding(VOCAB_SIZE, HIDDEN), nn.Embedding(capacity, HIDDEN)
        self.layers = nn.ModuleList(FixedLayer(append, batch, capacity) for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, VOCAB_SIZE)
        self.register_buffer("causal", torch.tril(torch.ones(capacity, capacity, dtype=torch.bool)))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.2, generator=generator)
        self.eval().requires_grad_(False)

    def forward(self, ids: Tensor, where: Any) -> Tensor:
        position = torch.arange(where, where + ids.shape[1]) if self.by_number else where
        x = self.tokens(ids) + self.places(position)
        mask = self.causal[None, None, position] if self.masked else None
        for layer in self.layers:
            x = layer(x, where, mask)
        return self.head(x)


@torch.no_grad()
def generate(
    model: Any, ids: Tensor, count: int, by_number: bool, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Greedy tokens `[batch, count]` and the logits that they are of, from a prompt at position 0.

    Args:
        model: The decoder, compiled or not.
        ids: The prompt.
        count: Tokens.
        by_number: Whether the position is a number.
        chunk: Tokens of the prompt's pieces.
    """
    at, logits = 0, torch.empty(0)
    for piece in ids.split(chunk or ids.shape[1], dim=1):
        logits = model(piece, at if by_number else torch.arange(at, at + piece.shape[1]))[:, -1]
        at += piece.shape[1]
    tokens, steps = [], []
    for _ in range(count):
        steps.append(logits)
        tokens.append(logits.argmax(-1, keepdim=True))
        logits = model(tokens[-1], at if by_number else torch.tensor([at]))[:, -1]
        at += 1
    return torch.cat(tokens, 1), torch.stack(steps, 1)
