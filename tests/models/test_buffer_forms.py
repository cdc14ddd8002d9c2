"""Buffers of fixed length in every form, and written in every way, are caches: found by moving ids."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from specache_fx.runtime.handles.handle_tensor import Handle

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, KV_HEADS, DIM, ROOM, ROWS, TOKENS = 4, 2, 8, 48, 3, 61
OPTIONS: dict[str, Any] = {
    "bits": 16,
    "group_size": 4,
    "residual_length": 4,
    "lowering": "eager",
    "strict": True,
}
APART = (ROWS, ROOM, KV_HEADS, DIM)
SIZES: dict[str, list[tuple[int, ...]]] = {
    "pair written at once": [(ROWS, ROOM, 2, KV_HEADS, DIM)],
    "pair written one by one": [(ROWS, ROOM, 2, KV_HEADS, DIM)],
    "pair first": [(2, ROWS, KV_HEADS, ROOM, DIM)],
    "projections": [(ROWS, ROOM, KV_HEADS * DIM)] * 2,
    "sequence first": [(ROOM, ROWS, KV_HEADS, DIM)] * 2,
    "keys transposed": [(ROWS, KV_HEADS, DIM, ROOM), (ROWS, KV_HEADS, ROOM, DIM)],
    "scattered": [APART] * 2,
    "at a number of a tensor": [APART] * 2,
    "one row, of tokens without a batch": [(1, ROOM, KV_HEADS, DIM)] * 2,
    "rows read one after the other": [APART] * 2,
    "rows read one after the other, spelt out": [APART] * 2,
}
# What is moved otherwise from the 20th token on, or has other numbers.
CHANGED = ("newest read", "rows clamped", "integers read")
SIZES_OF_CHANGED = dict.fromkeys(CHANGED, [APART] * 2)


class Decoder(nn.Module):
    """Two layers of attention over buffers, which are longer than the sequence and of more rows than the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, width, self.widths = kind, HEADS * DIM, [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        self.table, self.places = nn.Embedding(TOKENS, width), nn.Embedding(ROOM, width)
        self.qkv = nn.ModuleList(nn.Linear(width, sum(self.widths)) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.buffers_ = [[torch.zeros(size) for size in (SIZES | SIZES_OF_CHANGED)[kind]] for _ in range(2)]

    def forward(self, ids: Tensor, start: Any) -> Tensor:
        q_len = ids.shape[1]
        if self.kind == "at a number of a tensor":
            start = start[0].item()
            torch._check(start >= 0)
            torch._check(start + q_len <= ROOM)
        where = torch.arange(q_len) + start
        x = self.table(ids) + self.places(where)
        for qkv, out, buffers in zip(self.qkv, self.out, self.buffers_, strict=True):
            q, k, v = (side.unflatten(-1, (-1, DIM)) for side in qkv(x).split(self.widths, -1))
            keys, values = self.write(k, v, buffers, where, start)
            first = max(0, start - 20) if self.kind == "newest read" else 0
            keys, values = (self.read(side, first, where) for side in (keys, values))
            seen = torch.arange(first, ROOM if first else keys.shape[2])[None] <= where[:, None]
            if "after" in self.kind:
                keys, values = (
                    keys.repeat(1, HEADS // KV_HEADS, 1, 1),
                    values.repeat(1, HEADS // KV_HEADS, 1, 1),
                )
            if "spelt" in self.kind:
                scores = q.transpose(1, 2) @ keys.mT * DIM**-0.5
                heads = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
            else:
                heads = F.scaled_dot_product_attention(
                    q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True
                )
            x = x + out(heads.transpose(1, 2).flatten(2))
        return F.linear(x, self.table.weight)

    def read(self, side: Tensor, first: int, where: Tensor) -> Tensor:
        match self.kind:
            case "newest read":
                return side[:, :, first:]
            case "rows clamped":
                return side[:, :, (torch.arange(ROOM) - (where[-1] - 20).clamp(min=0)).clamp(min=0)]
            case "integers read":
                return side.int().float()
        return side

    def write(
        self, k: Tensor, v: Tensor, buffers: list[Tensor], where: Tensor, start: Any
    ) -> tuple[Tensor, ...]:
        """Keys and values `[batch, KV_HEADS, kv_len or ROOM, DIM]`; `k` and `v` have tokens first."""
        (rows, q_len), first = k.shape[:2], buffers[0]
        end = start + q_len
        match self.kind:
            case "pair written at once":
                first[:rows, start:end] = torch.stack([k, v], 2)
                return tuple(side.transpose(1, 2) for side in first[:rows, :end].unbind(2))
            case "pair written one by one":
                first[:rows, start:end, 0], first[:rows, start:end, 1] = k, v
                return tuple(side.transpose(1, 2) for side in first[:rows, :end].unbind(2))
            case "pair first":
                first[:, :rows, :, start:end] = torch.stack([k, v]).transpose(2, 3)
                return first[:, :rows].unbind(0)
            case "projections":
                for buffer, new in zip(buffers, (k, v), strict=True):
                    buffer[:rows].index_copy_(1, where, new.flatten(2))
                return tuple(each[:rows].unflatten(2, (-1, DIM)).transpose(1, 2) for each in buffers)
            case "sequence first":
                for buffer, new in zip(buffers, (k, v), strict=True):
                    buffer[start:end, :rows] = new.transpose(0, 1)
                return tuple(each[:, :rows].permute(1, 2, 0, 3) for each in buffers)
            case "keys transposed":
                first[:rows, :, :, start:end] = k.permute(0, 2, 3, 1)
                buffers[1][:rows, :, start:end] = v.transpose(1, 2)
                return first[:rows].mT, buffers[1][:rows]
            case "scattered":
                for buffer, new in zip(buffers, (k, v), strict=True):
                    buffer[:rows].scatter_(1, where[None, :, None, None].expand(k.shape), new)
            case "one row, of tokens without a batch":
                for buffer, new in zip(buffers, (k, v), strict=True):
                    buffer[0, start:end] = new[0]
            case _:
                for buffer, new in zip(buffers, (k, v), strict=True):
                    buffer[:rows, start:end] = new
        return tuple(each[:rows].transpose(1, 2) for each in buffers)


@torch.no_grad()
def generate(model: Any, kind: str, ids: Tensor, turn: int) -> list[Tensor]:
    """Logits of a prompt, of 14 steps, of a turn and of 4 steps more."""
    logits, start = list[Tensor](), 0
    for count in (0, *[1] * 14, turn, *[1] * 4):
        ids = logits[-1][:, -1:].argmax(-1).expand(-1, count) if count else ids
        logits.append(model(ids, torch.tensor([start]) if "number" in kind else start))
        start += ids.shape[1]
    return logits


@pytest.mark.parametrize("batch", nightly_unless((2).__eq__, [1, 2, ROWS]))
@pytest.mark.parametrize("kind", SIZES)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_buffer_of_any_form_is_a_cache(kind: str, batch: int) -> None:
    torch.manual_seed(0)
    plain = Decoder(kind).eval()
    inner = copy.deepcopy(plain)
    ours = torch.compile(inner, backend="specache", options=OPTIONS)
    for length in (11, 6):
        ids = torch.randint(TOKENS, (1 if kind.startswith("one row") else batch, length))
        for found, expected in zip(generate(ours, kind, ids, 3), generate(plain, kind, ids, 3), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for buffer, size in zip(inner.buffers_[1], SIZES[kind], strict=True):
            assert type(buffer) is Handle and buffer.shape == size


@pytest.mark.parametrize("kind", CHANGED)
def test_what_is_read_otherwise_later_on_is_left_alone(kind: str) -> None:
    ours = torch.compile(Decoder(kind).eval(), backend="specache", options=OPTIONS)
    with pytest.raises(BackendCompilerFailed, match=r"is left alone|leaves this model as it is"):
        generate(ours, kind, torch.randint(TOKENS, (2, 11)), 3)


class Counting(nn.Module):
    """Counts the tokens of its buffers in an int."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = Decoder("rows read one after the other"), 0

    def forward(self, ids: Tensor) -> Tensor:
        start, self.count = self.count, self.count + ids.shape[1]
        return self.inner(ids, start)


@torch.no_grad()
@pytest.mark.parametrize("first", [11, 1])
def test_a_count_of_the_module_is_a_variable_of_its_decode_graph(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = Counting().eval()
    inner = copy.deepcopy(plain)
    ours = torch.compile(inner, backend="specache", options=OPTIONS)
    ids = torch.randint(TOKENS, (2, 30))
    torch.testing.assert_close(ours(ids[:, :first]), plain(ids[:, :first]), rtol=1e-4, atol=1e-4)
    for i in range(first, 30):
        with torch.compiler.set_stance("default" if i < first + 2 else "fail_on_recompile"):
            found = ours(ids[:, i : i + 1])
        torch.testing.assert_close(found, plain(ids[:, i : i + 1]), rtol=1e-4, atol=1e-4)
    assert inner.count == 30 and "can't be read" not in caplog.text


class Growing(nn.Module):
    """Keys and values grow by cat, and attention reads tokens by an index that is all of them at first."""

    def __init__(self, index: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.index, self.table = index, nn.Embedding(TOKENS, HEADS * DIM)

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        q = self.table(ids).unflatten(-1, (HEADS, DIM))
        keys, values = (
            (q.sin(), q.cos())
            if past is None
            else (torch.cat([p, n], 1) for p, n in zip(past, (q.sin(), q.cos()), strict=True))
        )
        read = (side[:, self.index(torch.arange(side.shape[1]))].transpose(1, 2) for side in (keys, values))
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), *read, is_causal=past is None)
        return F.linear(heads.transpose(1, 2).flatten(2), self.table.weight), (keys, values)


@torch.no_grad()
@pytest.mark.parametrize("index", [lambda place: place.clamp(max=20), lambda place: place % 16])
def test_an_index_that_moves_tokens_later_on_is_refused(index: Callable[[Tensor], Tensor]) -> None:
    ours = torch.compile(Growing(index).eval(), backend="specache", options=OPTIONS)

    def generated() -> None:
        past = None
        for q_len in (5, 1, 1):
            _, past = ours(torch.randint(TOKENS, (2, q_len)), past)

    with pytest.raises(BackendCompilerFailed, match="is left alone"):
        generated()
