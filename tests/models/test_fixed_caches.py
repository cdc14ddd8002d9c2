"""Caches of fixed length, which a model writes in place: rewritten, equal, and their memory given back."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from support.fixed_modules import BY_NUMBER, BY_TENSOR, OF_ROWS, VOCAB_SIZE, FixedDecoder, generate
from support.zoo import TWO_LANES
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import specache_fx
from specache_fx.errors import CacheHandleError, SavedCacheError
from specache_fx.runners import fixed_runner

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OPTIONS = TWO_LANES | {"bits": 16, "strict": True}
ALL_STAGED = {"bits": 1, "top_k": 256}


def compiled(model: FixedDecoder, **options: Any) -> Any:
    return torch.compile(model, backend="specache", options=OPTIONS | options)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, position: int, token: int = 5) -> torch.Tensor:
    return model(torch.full((2, 1), token), torch.tensor([position]))


def begun(
    length: int, count: int, kind: type[FixedDecoder] = FixedDecoder, num_layers: int = 1, **options: Any
) -> tuple[FixedDecoder, FixedDecoder, Any]:
    """A decoder, its twin, and that one compiled: both have generated `count` tokens after a prompt."""
    plain, model = (kind("index_put", num_layers=num_layers) for _ in range(2))
    ours = compiled(model, **options)
    for each in (plain, ours):
        generate(each, prompt(length), count, by_number=False)
    return plain, model, ours


# One by a tensor, one by a number; `make test-all` has the others.
_DAILY = next(iter(BY_TENSOR)), "sliced_to_the_end", "repeated_before_swapped"


@pytest.mark.parametrize("spelling", nightly_unless(_DAILY.__contains__, BY_TENSOR | BY_NUMBER))
def test_every_spelling_is_rewritten_and_equal(spelling: str) -> None:
    layers = 1 + (spelling == "index_put")
    plain, model = (FixedDecoder(spelling, num_layers=layers) for _ in range(2))
    ours = compiled(model, **ALL_STAGED)
    # Three generations on the same buffers, the last prompt in pieces.
    for seed, (length, count, chunk) in enumerate(((20, 100, None), (33, 12, None), (30, 12, 7))):
        expected = generate(plain, prompt(length, seed), count, plain.by_number, chunk)
        found = generate(ours, prompt(length, seed), count, plain.by_number, chunk)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
        stats = specache_fx.stats(model.layers[0].keys)
        assert (stats.kv_len, stats.steps, stats.exact_hit_rate) == (length + count, count, 1.0)
        assert stats.prefetched_rows > 0


@pytest.mark.parametrize("spelling", OF_ROWS)
def test_a_batch_of_fewer_rows_than_the_buffers(spelling: str) -> None:
    plain, model = (FixedDecoder(spelling, batch=4) for _ in range(2))
    ours, by_number = compiled(model, **ALL_STAGED), model.by_number
    for batch in (2, 2, 3):
        ids = torch.randint(1, 97, (batch, 30), generator=torch.Generator().manual_seed(batch))
        (tokens, logits), expected = (generate(each, ids, 40, by_number) for each in (ours, plain))
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logits, expected[1], rtol=1e-4, atol=1e-4)
        assert specache_fx.stats(model.layers[0].keys).kv_len == 69 + 1
    with pytest.raises(CacheHandleError, match=r"A call of 2 sequences goes on with .* holds 3"):
        ours(tokens[:2, :1], 70 if by_number else torch.tensor([70]))
    with torch.no_grad():
        looked = torch.compile(lambda: model.layers[0].keys.mean((1, 2, 3)), backend="specache")()
        torch.testing.assert_close(looked[:3], plain.layers[0].keys.mean((1, 2, 3))[:3], rtol=1e-4, atol=1e-4)
        at = 70 if by_number else torch.tensor([70])  # the buffers hold numbers again, and are taken over
        torch.testing.assert_close(ours(tokens[:, -1:], at), plain(tokens[:, -1:], at), rtol=1e-4, atol=1e-4)


def test_other_rows_than_the_first_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def every_other_row(buffer: Tensor, position: Tensor, new: Tensor) -> Tensor:
        return buffer[::2].index_copy_(-2, position, new)

    plain, model = (FixedDecoder("index_put", batch=4) for _ in range(2))
    for each in (plain, model):
        each.layers[0].append = every_other_row
    found = generate(compiled(model, strict=False), prompt(9), 5, by_number=False)
    torch.testing.assert_close(found, generate(plain, prompt(9), 5, by_number=False))
    assert "is left alone" in caplog.text


COPIES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "repeated": (2, lambda buffer: buffer.repeat_interleave(2, 0)),
    "one row": (2, lambda buffer: buffer[1:].clone()),
    "spare rows": (4, lambda buffer: buffer.clone()),
}


@pytest.mark.parametrize("name", COPIES)
@torch.no_grad()
def test_copies_of_buffers_go_on_with_the_rows_that_they_have(name: str) -> None:
    rows, copied = COPIES[name]
    plain, model = (FixedDecoder("index_copy_of_rows", batch=rows, num_layers=2) for _ in range(2))
    ours = compiled(model, **ALL_STAGED)
    for each in (plain, ours):
        generate(each, prompt(20), 12, by_number=False)
    for each in (plain, model):
        for layer in each.layers:
            layer.keys, layer.values = copied(layer.keys), copied(layer.values)
    batch = min(len(plain.layers[0].keys), 4 if name == "repeated" else 2)
    for position in (32, 33):
        one = torch.full((batch, 1), 5), torch.tensor([position])
        torch.testing.assert_close(ours(*one), plain(*one), rtol=1e-4, atol=1e-4)
        if position == 32:  # a graph that is left alone reads the rows of all sequences
            looked = torch.compile(lambda: model.layers[1].keys.mean((1, 2, 3)), backend="specache")()
            expected = plain.layers[1].keys.mean((1, 2, 3))
            torch.testing.assert_close(looked[:batch], expected[:batch], rtol=1e-4, atol=1e-4)


def test_memory_of_the_buffers_is_given_back() -> None:
    model = FixedDecoder("index_put", capacity=2048)
    ours = compiled(model, bits=2)
    held = model.layers[0].keys.untyped_storage().nbytes()
    generate(ours, prompt(1500), 4, by_number=False)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor
        for layer in model.layers
        for tensor in (layer.keys, layer.values)
    }
    assert sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) < held / 10
    stats = specache_fx.stats(model.layers[0].keys)
    assert stats.device_bytes < stats.full_bytes / 2
    with pytest.raises(CacheHandleError, match="holds placeholders"):
        model.layers[0].keys.sum()
    with pytest.raises(CacheHandleError, match="holds placeholders"):
        step(model, 1504)  # uncompiled


def test_a_position_goes_back_and_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, ours = begun(40, 20, **ALL_STAGED)
    with pytest.raises(CacheHandleError, match="position 62 of a cache that holds 60"):
        step(ours, 62)
    with pytest.raises(CacheHandleError, match="not one after the other"):
        ours(prompt(2), torch.tensor([60, 62]))
    for position in (60, 50, 51, 30, 31):  # nothing is lost
        torch.testing.assert_close(step(ours, position), step(plain, position), rtol=1e-4, atol=1e-4)
    more = prompt(6, 1), torch.arange(20, 26)
    torch.testing.assert_close(ours(*more), plain(*more), rtol=1e-4, atol=1e-4)
    assert specache_fx.stats(model.layers[0].keys).kv_len == 26
    # On a device a wrong position gives NaN: the host doesn't read it there, for it would wait.
    monkeypatch.setattr(fixed_runner, "HOST", "none")
    torch.testing.assert_close(step(ours, 26), step(plain, 26), rtol=1e-4, atol=1e-4)
    assert step(ours, 33).isnan().all()
    again = generate(ours, prompt(20), 3, by_number=False)
    assert torch.equal(again[0], generate(plain, prompt(20), 3, by_number=False)[0])
    monkeypatch.undo()
    for reset in (torch.Tensor.zero_, lambda buffer: buffer.fill_(0)):
        for layer in model.layers:
            reset(layer.keys)  # then they have no past
        with pytest.raises(CacheHandleError, match="was written to"):
            step(ours, 23)
        again = generate(ours, prompt(20), 3, by_number=False)
        assert torch.equal(again[0], generate(plain, prompt(20), 3, by_number=False)[0])


def test_a_full_buffer_is_refused() -> None:
    ours = compiled(FixedDecoder("index_put", capacity=24))
    generate(ours, prompt(20), 4, by_number=False)
    with pytest.raises(CacheHandleError, match="room for 24 tokens, and this call would make them 25"):
        step(ours, 24)


def test_what_somebody_else_writes_is_refused() -> None:
    model = FixedDecoder("index_put", num_layers=2)
    ours = compiled(model)
    generate(ours, prompt(20), 3, by_number=False)
    keys = model.layers[1].keys
    with pytest.raises(CacheHandleError):
        keys[:, :, 3] = 0
    with torch._C.DisableTorchFunctionSubclass():
        keys[:, :, 3] = 0
    with pytest.raises(CacheHandleError, match="was written to"):
        step(ours, 23)
    plain = FixedDecoder("index_put", num_layers=2)
    assert torch.equal(
        generate(ours, prompt(20), 3, by_number=False)[0], generate(plain, prompt(20), 3, by_number=False)[0]
    )


def test_a_copy_goes_its_own_way() -> None:
    plain, model, ours = begun(30, 10, **ALL_STAGED)
    other, other_plain = copy.deepcopy(model), copy.deepcopy(plain)
    forked = compiled(other, **ALL_STAGED)
    for position in range(40, 60):
        for one, two, token in ((ours, plain, 5), (forked, other_plain, 7)):
            found, expected = step(one, position, token), step(two, position, token)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_that_fails_midway_leaves_no_tokens() -> None:
    plain, model, ours = begun(20, 3, **ALL_STAGED)
    wrong = prompt(20)
    wrong[0, 3] = 10_000  # no token: the embedding raises, when the buffers are free
    for written in (False, True):
        with pytest.raises(IndexError):
            ours(wrong, torch.arange(20))
        with pytest.raises(CacheHandleError, match="whose prompt failed midway"):
            step(ours, 20)
        if written:  # a cache of the user's own
            for mine, theirs in zip(model.layers, plain.layers, strict=True):
                mine.keys.copy_(theirs.keys)
                mine.values.copy_(theirs.values)
            torch.testing.assert_close(step(ours, 23), step(plain, 23), rtol=1e-4, atol=1e-4)
        again = generate(ours, prompt(20), 3, by_number=False)
        assert torch.equal(again[0], generate(plain, prompt(20), 3, by_number=False)[0])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_starts_anew(copied: Callable[[Tensor], Tensor]) -> None:
    plain, model, ours = begun(30, 10, **ALL_STAGED)
    expected = generate(plain, prompt(20), 3, by_number=False)
    for reset in (False, True):
        for layer in model.layers:
            layer.keys, layer.values = copied(layer.keys), copied(layer.values)
            if reset:
                layer.keys.zero_()
        with pytest.raises(SavedCacheError, match="A cache of fixed length"):
            specache_fx.save([layer.keys for layer in model.layers], "nowhere")
        assert torch.equal(generate(ours, prompt(20), 3, by_number=False)[0], expected[0])


def test_a_prompt_that_ran_uncompiled_is_taken_over() -> None:
    plain, model = FixedDecoder("index_put"), FixedDecoder("index_put")
    for each in (plain, model):
        generate(each, prompt(30), 2, by_number=False)
    ours = compiled(model, **ALL_STAGED)
    for position in range(32, 60):
        torch.testing.assert_close(step(ours, position), step(plain, position), rtol=1e-4, atol=1e-4)
    assert specache_fx.stats(model.layers[0].keys).kv_len == 60


class Counting(FixedDecoder):
    """Is given its mask, and reads it once more by itself."""

    def forward(self, ids: Tensor, where: Any) -> Tensor:
        where, mask = where
        x = self.tokens(ids) + self.places(where)
        for layer in self.layers:
            x = layer(x, where, mask)
        return self.head(x) * (1 + mask.sum() / 10 + mask.shape[-1])


def test_a_mask_that_something_else_reads_is_whole_there() -> None:
    plain, model = Counting("index_put"), Counting("index_put")
    ours = compiled(model, strict=False)
    causal = torch.ones(160, 160, dtype=torch.bool).tril()
    for start, count in ((0, 9), (9, 1), (10, 1), (11, 4), (15, 1)):
        where = torch.arange(start, start + count)
        call = prompt(count, start), (where, causal[where])
        torch.testing.assert_close(ours(*call), plain(*call), rtol=1e-4, atol=1e-4)


class Peeking(FixedDecoder):
    """Reads a buffer by itself where it is asked to."""

    peeks = False

    def forward(self, ids: torch.Tensor, where: Any) -> torch.Tensor:
        logits = super().forward(ids, where)
        return logits + self.layers[0].keys.sum() if self.peeks else logits


@pytest.mark.parametrize("lowering", nightly_unless("eager".__eq__, ["eager", "inductor"]))
def test_a_graph_that_is_left_alone_gets_its_numbers_back(lowering: str) -> None:
    plain, model, ours = begun(30, 2, Peeking, strict=False, lowering=lowering)
    plain.peeks = model.peeks = True
    for position in (32, 33):
        torch.testing.assert_close(step(ours, position), step(plain, position), rtol=1e-4, atol=1e-4)
    for one, two in zip(model.layers, plain.layers, strict=True):
        torch.testing.assert_close(one.keys, two.keys, rtol=1e-4, atol=1e-4)
        assert type(one.values) is torch.Tensor
    plain.peeks = model.peeks = False
    torch.testing.assert_close(step(ours, 34), step(plain, 34), rtol=1e-4, atol=1e-4)


def test_a_graph_that_reads_a_buffer_is_refused_by_name() -> None:
    model = Peeking("index_put")
    model.peeks = True
    with pytest.raises(BackendCompilerFailed, match=r"sum.*reads a cache of fixed length"):
        compiled(model)(prompt(20), torch.arange(20))


def test_a_prompt_that_fails_leaves_buffers() -> None:
    plain, model = (FixedDecoder("index_put", num_layers=2) for _ in range(2))
    ours = compiled(model)
    for _ in range(2):  # buffers of numbers, and of handles
        with pytest.raises(IndexError):
            ours(prompt(20) + VOCAB_SIZE, torch.arange(20))
        for tensor in (model.layers[0].keys, model.layers[1].values):
            assert type(tensor) is torch.Tensor and tensor.shape == (2, 2, 160, 16) and not tensor.any()
        found, expected = (generate(each, prompt(20), 3, by_number=False) for each in (ours, plain))
        assert torch.equal(found[0], expected[0])


def test_inference_mode() -> None:
    plain = FixedDecoder("index_put")
    with torch.inference_mode():
        model = FixedDecoder("index_put")
        ours = compiled(model, **ALL_STAGED)
        for _ in range(2):
            expected = generate(plain, prompt(30), 10, by_number=False)
            assert torch.equal(generate(ours, prompt(30), 10, by_number=False)[0], expected[0])


class InInferenceMode(FixedDecoder):
    """Enters the mode by itself, and its weights ask for gradients."""

    @torch.inference_mode()
    def forward(self, ids: Tensor, where: Any) -> Tensor:
        return super().forward(ids, where)


def test_inference_mode_of_the_model_itself() -> None:
    plain, model = (InInferenceMode("index_put").requires_grad_() for _ in range(2))
    ours = compiled(model, **ALL_STAGED)
    for _ in range(2):
        with torch.enable_grad():
            expected, found = (
                generate.__wrapped__(each, prompt(30), 10, by_number=False)  # type: ignore[attr-defined]
                for each in (plain, ours)
            )
        assert torch.equal(found[0], expected[0]) and not found[1].requires_grad
    assert specache_fx.stats(model.layers[0].keys).exact_hit_rate == 1.0


def test_explain_of_a_fixed_cache() -> None:
    report = specache_fx.explain(
        FixedDecoder("index_put"),
        options={"lookahead": "token"},
        run=lambda each: generate(each, prompt(9), 3, by_number=False),
    )
    assert [len(graph.rewritten) for graph in report.graphs] == [1, 1] and report.graphs[1].lanes == 2


class OneLayer(torch.nn.Module):
    """One attention over buffers of 16 rows; `attend(self, q, k, v, where)` writes and reads."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.embed, self.qkv = torch.nn.Embedding(VOCAB_SIZE, 64), torch.nn.Linear(64, 192)
        self.register_buffer("keys", torch.zeros(1, 4, 16, 16))
        self.register_buffer("values", torch.zeros(1, 4, 16, 16))
        self.eval().requires_grad_(False)

    def forward(self, ids: Tensor, where: Any) -> Tensor:
        q, k, v = (x.view(1, -1, 4, 16).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        return self.attend(self, q, k, v, where)

    def write(self, k: Tensor, v: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, rows], self.values[:, :, rows] = k, v
        return self.keys, self.values


def in_query_lane(plain: OneLayer, **options: Any) -> Any:
    """A compiled copy: it returns no logits to speculate on."""
    return compiled(copy.deepcopy(plain), lookahead="query", **options)


@torch.no_grad()
def assert_same_steps(
    plain: Any,
    ours: Any,
    pieces: tuple[int, ...] = (5,),
    tokens: int = 16,
    tell: Any = None,
    near: float = 1e-4,
) -> None:
    """A prompt in pieces, and single tokens; `tell` makes of positions what the model is given."""
    start = 0
    for count in (*pieces, *[1] * (tokens - sum(pieces))):
        ids, where = prompt(count)[:1], torch.arange(start, start + count)
        told = where if tell is None else tell(where)
        torch.testing.assert_close(ours(ids, told), plain(ids, told), rtol=near, atol=near)
        start += count


def ring(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where % 16)
    age = (where[:, None] - torch.arange(16)[None]) % 16
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=age <= where[:, None])


def open_mask(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.zeros(len(where), 16))


def narrow_mask(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.ones(len(where), 1).bool())


def bucket(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    return F.scaled_dot_product_attention(q, keys[:, :, :12], values[:, :, :12])


def from_the_end(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where - 16)
    mask = torch.arange(16)[None] >= 16 - len(where)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.expand(len(where), 16))


def spelt_out(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    hidden = torch.arange(16)[None] > where[:, None]
    return (q @ keys.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ values


def hidden_where_told(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, told: tuple[Tensor, Tensor]) -> Tensor:
    keys, values = s.write(k, v, told[0])
    return (q @ keys.mT).masked_fill(told[1], -torch.inf).softmax(-1) @ values


def squared(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    hidden = torch.arange(16)[None] > where[:, None]
    return ((q @ keys.mT) ** 2).masked_fill(hidden, -torch.inf).softmax(-1) @ values


def less_a_maximum_over_queries(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    scores = (q @ keys.mT).masked_fill(torch.arange(16)[None] > where[:, None], -1e30)
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ values


def biased_in_float32(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    bias = 500 + torch.tensor([0.41, 0.33, 0.26, 0.17])[:, None, None] * torch.arange(16)
    scores = (q @ keys.mT).float() + bias
    hidden = torch.arange(16)[None] > where[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ values


def apart(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    torch._dynamo.graph_break()
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.arange(16)[None] <= where[:, None])


def first_heads(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = (side[:, :2].repeat_interleave(2, 1) for side in s.write(k, v, where))
    mask = torch.arange(16)[None] <= where[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def tokens_for_heads(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    """Each row of the buffer is a head, and each head a token."""
    keys, values = (side.transpose(1, 2) for side in s.write(k, v, where))
    return F.scaled_dot_product_attention(q.repeat(1, 4, 1, 1), keys, values, attn_mask=where[:, None] >= 0)


@pytest.mark.parametrize(
    ("attend", "named"),
    [
        (ring, "mask shows rows of a cache behind the 1 tokens"),
        (open_mask, "mask shows rows of a cache behind the 5 tokens"),
        (narrow_mask, "and no mask hides its unwritten rows"),
        (bucket, "reads the first 12 rows of a cache that holds 5 tokens"),
        (from_the_end, "position -16, counted from the end"),
        (
            squared,
            r"its form is not one that specache knows: `pow.*scaled_dot_product_attention there if it can be",
        ),
        (less_a_maximum_over_queries, "`sub.*makes other scores of the products"),
        (first_heads, "is left alone: its keys are computed from a cache of fixed length"),
        (tokens_for_heads, "is left alone: its keys are computed from a cache of fixed length"),
        (apart, "no attention reads them here"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_be_another_answer_is_refused(attend: Callable[..., Tensor], named: str) -> None:
    plain = OneLayer(attend)
    with pytest.raises((CacheHandleError, BackendCompilerFailed), match=named):
        assert_same_steps(plain, in_query_lane(plain), tokens=20)


def a_prompt_to_its_own(self: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    """A prompt attends to the tokens that it writes, and to none before them; a step to the buffers."""
    self.write(k, v, where)
    if len(where) > 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, self.keys, self.values, torch.arange(16) <= where[:, None])


def beside_a_log(self: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    """A buffer of queries, which no attention reads, written from its third row on."""
    keys, values = self.write(k, v, where)
    self.log[:, :, where + 2] = q
    return F.scaled_dot_product_attention(q, keys, values, torch.arange(16) <= where[:, None])


def spelt_out_beside_a_log(self: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = self.write(k, v, where)
    self.log[:, :, where + 2] = q
    scores = (q @ keys.transpose(-1, -2) / 4).masked_fill(torch.arange(16) > where[:, None], -torch.inf)
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("attend", [beside_a_log, spelt_out_beside_a_log])
@torch.no_grad()
def test_a_buffer_that_no_attention_reads_is_the_models(attend: Callable[..., Tensor]) -> None:
    plain = OneLayer(attend)
    plain.register_buffer("log", torch.zeros(1, 4, 32, 16))
    model = copy.deepcopy(plain)
    assert_same_steps(plain, compiled(model, lookahead="query"), tokens=9)
    torch.testing.assert_close(model.log, plain.log)


@torch.no_grad()
def test_a_prompt_that_attends_to_its_own_tokens() -> None:
    plain = OneLayer(a_prompt_to_its_own)
    model = copy.deepcopy(plain)
    ours = compiled(model, lookahead="query")
    for last in (16, 12):
        for start, count in ((0, 5), *((i, 1) for i in range(5, last))):
            ids, where = prompt(count)[:1], torch.arange(start, start + count)
            torch.testing.assert_close(ours(ids, where), plain(ids, where), rtol=1e-4, atol=1e-4)
            if start == 5:  # a second piece would see nothing of the first one
                with pytest.raises(
                    CacheHandleError, match=r"reads 3 tokens, and the cache holds 9.*in one call"
                ):
                    ours(prompt(3)[:1], torch.arange(6, 9))
        assert specache_fx.stats(model.keys).steps == last - 5


@pytest.mark.parametrize("options", [{}, ALL_STAGED], ids=["16 bits", "1 bit"])
def test_attention_that_is_spelt_out(options: dict[str, Any]) -> None:
    plain = OneLayer(spelt_out)
    ours = in_query_lane(plain, **options)
    for _ in range(2):
        assert_same_steps(plain, ours, pieces=(3, 2))


def test_attention_that_is_spelt_out_with_a_mask_that_is_given() -> None:
    plain = OneLayer(hidden_where_told)
    assert_same_steps(
        plain, in_query_lane(plain), tell=lambda where: (where, torch.arange(16)[None] > where[:, None])
    )


class RowsOfATable(OneLayer):
    """Its mask is made before the call, for all positions; it returns logits."""

    def __init__(self) -> None:
        super().__init__(self.attend_by_table)

    @staticmethod
    def attend_by_table(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, told: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = s.write(k, v, told[0])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=told[1][None, None, told[0]])

    def forward(self, ids: Tensor, where: Any) -> Tensor:
        return super().forward(ids, where).transpose(1, 2).flatten(2) @ self.embed.weight.T


def test_a_mask_of_rows_of_a_table_that_is_given() -> None:
    plain, table = RowsOfATable(), torch.ones(16, 16, dtype=torch.bool).tril()
    model = copy.deepcopy(plain)
    assert_same_steps(plain, compiled(model), tell=lambda where: (where, table))
    stats = specache_fx.stats(model.keys)
    assert stats.kv_len == 16 and stats.exact_hit_rate is not None


def hidden_by_a_number(s: OneLayer, q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
    keys, values = s.write(k, v, where)
    mask = torch.zeros(len(where), 16).masked_fill(torch.arange(16)[None] > where[:, None], -1e4)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def test_rows_that_a_finite_number_hides_are_hidden() -> None:
    plain = OneLayer(hidden_by_a_number)
    assert_same_steps(plain, in_query_lane(plain))


class Absorbed(torch.nn.Module):
    """Attention over a buffer of latents, `[batch, tokens, channels]`, that are keys and values for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.down = torch.nn.Embedding(VOCAB_SIZE, 64), torch.nn.Linear(64, 16)
        self.register_buffer("latents", torch.zeros(1, 16, 16))
        self.eval().requires_grad_(False)

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        x = self.embed(ids)
        self.latents[:, where] = self.down(x)
        scores = x.unflatten(2, (4, 16)).transpose(1, 2) @ self.latents.mT[:, None]
        hidden = torch.arange(16)[None] > where[:, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.latents[:, None]


def test_a_buffer_of_latents_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    plain = Absorbed()
    ours = compiled(copy.deepcopy(plain), strict=False)
    assert_same_steps(plain, ours, tokens=7, near=1e-5)
    assert (
        len(
            re.findall(r"written in place, and `\w+` \(_softmax, .*? reads them in another form", caplog.text)
        )
        == 1
    )


def test_a_bias_that_16_bits_would_round_is_added_as_it_is() -> None:
    plain = OneLayer(biased_in_float32).bfloat16()
    assert_same_steps(plain, in_query_lane(plain), near=2e-2)


class KeepsNewestStates(torch.nn.Module):
    """Attention over a cache that grows, beside a buffer of the newest states that no attention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = torch.nn.Embedding(VOCAB_SIZE, 64), torch.nn.Linear(64, 192)
        self.head = torch.nn.Linear(64, VOCAB_SIZE)
        self.register_buffer("states", torch.zeros(1, 4, 6, 16))
        self.eval().requires_grad_(False)

    def forward(self, ids: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Any]:
        q, k, v = (x.view(1, -1, 4, 16).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        self.states.copy_(torch.cat([self.states[:, :, 1:], q], 2)[:, :, -6:])
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.head((out + self.states.mean(2, True)).transpose(1, 2).flatten(2)), (k, v)


@torch.no_grad()
def test_a_buffer_of_newest_states_is_no_cache_of_windows() -> None:
    plain = KeepsNewestStates()
    ours = compiled(copy.deepcopy(plain), lookahead="query")
    caches: list[Any] = [None, None]
    for i in range(20):
        ids = prompt(9)[:1] if i == 0 else torch.tensor([[i]])
        expected, caches[0] = plain(ids, caches[0])
        found, caches[1] = ours(ids, caches[1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert specache_fx.stats(caches[1]).kv_len == 28


class Broken(FixedDecoder):
    """A graph a layer from the second call on."""

    breaks = False

    def forward(self, ids: Tensor, where: Any) -> Tensor:
        x = self.tokens(ids) + self.places(where)
        mask = self.causal[None, None, where]
        for layer in self.layers:
            x = layer(x, where, mask)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x)


def test_graphs_of_single_layers_go_on_with_a_cache_of_all() -> None:
    plain, model, ours = begun(
        30, 5, Broken, num_layers=2, strict=False
    )  # a layer's graph has no second lane
    model.breaks = True
    for position in range(35, 45):
        torch.testing.assert_close(step(ours, position), step(plain, position), rtol=1e-4, atol=1e-4)


def llama(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, **sizes, **config)
    ).eval()


@torch.no_grad()
def test_a_static_cache_cannot_be_saved(tmp_path: Path) -> None:
    model = llama()
    model.compile(backend="specache", options=OPTIONS)
    cache = StaticCache(config=model.config, max_cache_len=64)
    model(prompt(9), past_key_values=cache)
    with pytest.raises(SavedCacheError, match="fixed length"):
        specache_fx.save(cache, tmp_path)


@pytest.mark.parametrize("made", ["by the user", "in the graph"])
@torch.no_grad()
def test_static_cache(made: str) -> None:
    plain, model = llama(), llama()
    model.compile(backend="specache", options=OPTIONS | ALL_STAGED)
    caches = [StaticCache(config=plain.config, max_cache_len=140) for _ in range(2)]
    if made == "by the user":
        for cache in caches:
            cache.early_initialization(2, 2, 32, torch.float32, "cpu")
    for count in (8, 100, 4):
        one = two = prompt(9)
        for i in range(count):
            expected = plain(one, past_key_values=caches[0]).logits
            found = model(two, past_key_values=caches[1]).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            one, two = expected[:, -1:].argmax(-1), found[:, -1:].argmax(-1)
            if i in (2, 5):
                for cache in caches:
                    cache.reorder_cache(torch.tensor([1, 0]))
        assert specache_fx.stats(caches[1]).kv_len == int(caches[0].layers[0].cumulative_length)
        more = prompt(5, count)
        found, expected = model(more, past_key_values=caches[1]), plain(more, past_key_values=caches[0])
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        for cache in caches:
            cache.reset()


@pytest.mark.parametrize("padded", nightly_unless(True.__eq__, [False, True]))
def test_generate_with_a_static_cache(padded: bool) -> None:
    ids = prompt(20).clamp(1)
    mask = torch.ones_like(ids)
    mask[1, : 6 * padded] = 0
    form: dict[str, Any] = {"min_new_tokens": 40, "max_new_tokens": 40, "return_dict_in_generate": True}
    form |= {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    expected = llama().generate(ids, **form).sequences
    rates = []
    for implementation in (None, "static"):
        model = llama()
        model.compile(backend="specache", options=OPTIONS | ALL_STAGED)
        for _ in range(2):
            found = model.generate(ids, cache_implementation=implementation, **form)
            assert torch.equal(found.sequences, expected)
        stats = specache_fx.stats(found.past_key_values)
        assert (stats.kv_len, stats.steps, stats.topk_hit_rate) == (59, 39, 1.0)
        rates.append(stats.exact_hit_rate)
    assert rates[0] == rates[1]
