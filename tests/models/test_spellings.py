"""How people spell things in modules of their own: each is rewritten and equal, or left alone with what to change."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from support.hooked import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    VOCABULARY,
    AssertsOfNumbers,
    AssertsOfPositions,
    Hooked,
    Pairs,
    SpeltOut,
    logits,
)
from support.open_sessions import all_end
from support.zoo import TWO_LANES
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import specache_fx
from specache_fx.runners import decode_runner
from specache_fx.runtime.session import registry

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OPTIONS = TWO_LANES | {"bits": 16, "group_size": 4, "residual_length": 4, "top_k": 4}
Graphs = list[tuple[int, int]]


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Of each decode graph that is made its lanes, and the attentions that are rewritten in it."""
    made: Graphs = []
    build = decode_runner.build_decode_graph

    def counting(gm: Any, program: Any, inputs: Any, lanes: int, *others: Any, **more: Any) -> Any:
        graph = build(gm, program, inputs, lanes, *others, **more)
        made.append((lanes, len(program.sites)))
        return graph

    monkeypatch.setattr(decode_runner, "build_decode_graph", counting)
    return made


@pytest.fixture(scope="module", autouse=True)
def rescale() -> Iterator[None]:
    """An operator that writes to its input, and one that is there for its effect."""
    library = torch.library.Library("spellings", "DEF")
    library.define("rescale(Tensor(a!) x, float factor) -> ()")
    library.impl("rescale", lambda x, factor: (x.mul_(factor), None)[1], "CompositeExplicitAutograd")
    torch.library.register_fake("spellings::rescale", lambda x, factor: None, lib=library)
    library.define("count(SymInt n) -> ()")
    library.impl("count", NOTES.append, "CompositeExplicitAutograd")
    torch.library.register_fake("spellings::count", lambda n: None, lib=library)
    library.define("note(Tensor x) -> ()")
    library.impl("note", lambda x: NOTES.append(x.shape[1]), "CompositeExplicitAutograd")
    torch.library.register_fake("spellings::note", lambda x: None, lib=library)
    yield
    library._destroy()


NOTES: list[int] = []


def equals_plain(model: Hooked, more: Callable[[int], tuple[Tensor, ...]] = lambda q_len: ()) -> float:
    """Largest difference of the compiled model's logits."""
    plain = logits(model, more)
    torch.manual_seed(0)
    compiled = logits(torch.compile(model, backend="specache", options=OPTIONS), more)
    assert plain.abs().mean() > 1
    return float((plain - compiled).abs().max())


def written_by(write: Callable[[Tensor], Any], where: str) -> Hooked:
    """A model that writes to a copy of its hidden states, its positions, or its state."""

    class Writing(Hooked):
        def positions(self, ids: Tensor, start: int) -> Tensor:
            x = super().positions(ids, start)
            if where == "positions":
                write(x)
            return x

        def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
            x = x.clone()
            if where == "data":
                write(x)
            if where == "state":
                write(self.state)
            return x * self.state

    return Writing()


def numpy_write(change: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
    return lambda x: change(x.numpy())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "an operator": lambda x: torch.ops.spellings.rescale(x, 1.5),
    "an overload": lambda x: torch.ops.spellings.rescale.default(x, 1.5),
    "aten's": lambda x: torch.ops.aten.mul_(x, 1.5),
    "numpy augmented": numpy_write(lambda a: a.__imul__(1.5)),
    "numpy item": numpy_write(lambda a: a.__setitem__((..., slice(0, 8)), 0.5)),
    "numpy fill": numpy_write(lambda a: a[..., 8:16].fill(0.7)),
}
OPERATORS, NUMPY = tuple(WRITES)[:3], tuple(WRITES)[3:]
WRITTEN = [
    *((OPERATORS, "positions"), (NUMPY, "data"), (("aten's",), "state")),  # by day
    *((OPERATORS, "data"), (NUMPY, "positions"), (OPERATORS[:1], "state"), (OPERATORS[1:2], "state")),
]  # Dynamo breaks the graph at NumPy's view of a buffer


def in_turn(names: Sequence[str]) -> Callable[[Tensor], Any]:
    return lambda x: [WRITES[name](x) for name in names]


@pytest.mark.parametrize(("names", "where"), nightly_unless(WRITTEN[:3].__contains__, WRITTEN), ids=str)
def test_a_write_by_another_library_is_seen(
    names: tuple[str, ...], where: str, compiled_graphs: Graphs
) -> None:
    plain = logits(written_by(in_turn(names), where))
    for left_out in names:
        others = [name for name in names if name != left_out]
        assert (plain - logits(written_by(in_turn(others), where))).abs().max() > 1
    compiled = logits(torch.compile(written_by(in_turn(names), where), backend="specache", options=OPTIONS))
    assert (plain - compiled).abs().max() < 0.02
    assert len(compiled_graphs) == 1


def test_heads_that_are_repeated_and_grouped_are_never_turned_the_wrong_way() -> None:
    assert equals_plain(RepeatedAndGrouped()) < 0.02


@pytest.mark.parametrize("where", ["data", "positions", "size"])
def test_an_operator_that_is_there_for_its_effect_runs_as_often_as_in_the_model(where: str) -> None:
    class Noting(Hooked):
        def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
            if where == "data":
                torch.ops.spellings.note(x)
            if where == "size":
                torch.ops.spellings.count(x.shape[1])
            return x

        def positions(self, ids: Tensor, start: int) -> Tensor:
            if where == "positions":
                torch.ops.spellings.note(torch.arange(start, start + ids.shape[1])[None])
            return super().positions(ids, start)

    NOTES.clear()
    logits(Noting())
    expected = NOTES.copy()
    for options in ({}, {"on_miss": "refetch"}):
        NOTES.clear()
        logits(torch.compile(Noting(), backend="specache", options=OPTIONS | options))
        assert expected == NOTES


def test_an_assertion_on_positions_holds_for_the_output_token_alone(compiled_graphs: Graphs) -> None:
    plain, model = AssertsOfPositions(), AssertsOfPositions()
    ours = torch.compile(model, backend="specache", options={**OPTIONS, "strict": True})
    torch.testing.assert_close(logits(ours, steps=6), logits(plain, steps=6), rtol=1e-4, atol=1e-4)
    assert compiled_graphs == [(2, 1)]
    for each in (plain, ours):
        with pytest.raises((AssertionError, RuntimeError), match="no position"):
            logits(each, steps=7)


@torch.no_grad()
def test_an_assertion_on_positions_of_a_prompt_of_one_token() -> None:
    plain = AssertsOfPositions()
    ours = torch.compile(AssertsOfPositions(), backend="specache", options={**OPTIONS, "strict": True})
    past = expected = None
    for token in range(5):
        ids = torch.tensor([[token + 3]])
        (out, past), (wanted, expected) = ours(ids, past), plain(ids, expected)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_a_python_number_of_the_models_data_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(Hooked):
        def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
            return x * (1 + 0.01 * x.argmax().item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert equals_plain(Scaled()) < 0.02
    assert "makes a Python number of the model's data" in caplog.text


class ScaledByGlobal(Hooked):
    def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
        return x * math.sqrt(2 / math.pi)


def test_a_global_float_that_is_a_symbol_is_a_number() -> None:
    options = {**OPTIONS, "strict": True}
    found = logits(torch.compile(ScaledByGlobal(), backend="specache", dynamic=True, options=options))
    torch.testing.assert_close(found, logits(ScaledByGlobal()), rtol=1e-4, atol=1e-4)


class Softcapped(Hooked):
    """With a softcap at which scores of float16 overflow."""

    def positions(self, ids: Tensor, start: int) -> Tensor:
        return super().positions(ids, start).to(self.head.weight.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        scores = 5e4 * torch.tanh(q @ k.mT * 0.25 / 5e4)
        return scores.masked_fill(hide, torch.finfo(q.dtype).min).softmax(-1) @ v


def test_a_softcap_at_the_end_of_float16_is_read() -> None:
    options = {**OPTIONS, "strict": True}
    found = logits(torch.compile(Softcapped().half(), backend="specache", options=options))
    torch.testing.assert_close(found.float(), logits(Softcapped()), rtol=0.05, atol=0.2)


class MasksOfMasks(Hooked):
    """A mask expanded over heads, in which each operation reads the last one's result twice."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        seen = (~hide)[None, None].expand(q.shape[0], q.shape[1], -1, -1)
        for _ in range(60):
            seen = seen & (seen | ~seen)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def test_a_mask_is_read_once_however_often_its_parts_are_used() -> None:
    assert equals_plain(MasksOfMasks()) < 1e-4


class ScaledByArgument(Hooked):
    """`forward` gets a float."""

    def hidden(self, x: Tensor, *more: Any) -> Tensor:
        return x * more[0]  # type: ignore[no-any-return]


def test_a_float_argument_that_is_a_symbol_is_named() -> None:
    options = {**OPTIONS, "strict": True}
    compiled = torch.compile(ScaledByArgument(), backend="specache", dynamic=True, options=options)
    ids = torch.randint(60, (1, 20), generator=torch.Generator().manual_seed(0))
    said = r"a float among the arguments .* without dynamic=True"
    with torch.no_grad():
        _, past = compiled(ids, None, 0.5)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=said):
            compiled(ids[:, :1], past, 0.5)
    torch._dynamo.reset()
    compiled = torch.compile(ScaledByArgument(), backend="specache", options=options)  # the remedy
    with torch.no_grad():
        _, past = compiled(ids, None, 0.5)
        _, past = compiled(ids[:, :1], past, 0.5)
    assert specache_fx.stats(past).steps == 1


def test_keys_of_one_sequence_for_all_are_no_cache_of_each(caplog: pytest.LogCaptureFixture) -> None:
    class Shared(Hooked):
        def run_layer(
            self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            sides = self.qkv[layer](x).chunk(3, -1)
            q, k, v = (side.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for side in sides)
            k, v = k[:1], v[:1]
            if past is not None:
                k, v = self.append(past[0], k), self.append(past[1], v)
            keys, values = (side.expand(len(q), -1, -1, -1) for side in (k, v))
            return x + self.attend(layer, q, keys, values, hide).transpose(1, 2).flatten(2), (k, v)

    assert equals_plain(Shared()) < 0.02
    assert "its queries are a batch of 2, its keys or values one of 1" in caplog.text


def test_an_assertion_on_numbers_keeps_one_lane(
    compiled_graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    assert equals_plain(AssertsOfNumbers()) < 0.02
    assert compiled_graphs == [(1, 1)] and "for its effect" in caplog.text


class MaskWrittenBetweenLayers(SpeltOut):
    num_layers = 2

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        if layer:
            hide[..., 2:5] = True
        return super().attend(layer, q, k, v, hide)


class BiasWrittenAfterItWasAdded(SpeltOut):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        bias = torch.zeros(hide.shape).masked_fill(hide, -1e30)
        scores = q @ k.transpose(-1, -2) + bias
        bias[..., 1:3] = 5.0
        return scores.softmax(-1) @ v


class NewestTokensGetTheirMask(SpeltOut):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        n = q.shape[2]
        scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(hide, -1e30)
        scores[:, :, :, -n:] += torch.full((n, n), -1e30).triu(1)
        return scores.softmax(-1) @ v


class QueryWrittenBeforeTheValues(SpeltOut):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q = q.clone()
        scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(hide, -1e30)
        gate = q.sigmoid_()
        return (scores.softmax(-1) @ v) * gate


class KeysWrittenUnderAnotherName(Hooked):
    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, flat, v = self.qkv[layer](x).split(HIDDEN, -1)
        flat = flat.clone()
        q, k, v = (side.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for side in (q, flat, v))
        if past is not None:
            k, v = self.append(past[0], k), self.append(past[1], v)
        out = self.attend(layer, q, k, v, hide)
        if past is None:
            flat.mul_(0.5)
        return x + out.transpose(1, 2).flatten(2), (k, v)


class RepeatedKeysWritten(Hooked):
    """A copy of the keys for each query head, which the cache is not."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q = q.repeat_interleave(2, 1)
        k, v = (side.repeat_interleave(2, 1) for side in (k, v))
        k.mul_(1.5)
        return super().attend(layer, q, k, v, hide)[:, ::2]


class QueryScaledBesideItsKeys(Hooked):
    """All three are views of one projection; the query alone is written to."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q *= 1.5
        return super().attend(layer, q, k, v, hide)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (MaskWrittenBetweenLayers, ""),
        (BiasWrittenAfterItWasAdded, ""),
        (NewestTokensGetTheirMask, ""),
        (QueryWrittenBeforeTheValues, ""),
        (KeysWrittenUnderAnotherName, "which is not a pair of tensors"),
        (RepeatedKeysWritten, "don't form groups"),
        (QueryScaledBesideItsKeys, ""),
    ],
)
def test_what_is_written_between_its_readers(
    model: type[Hooked], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert equals_plain(model()) < 0.02
    assert told in caplog.text
    assert bool(told) == ("is left alone" in caplog.text)


class ByKeyword(SpeltOut):
    def positions(self, ids: Tensor, start: int) -> Tensor:
        return F.embedding(torch.arange(start, start + ids.shape[1]), weight=self.table)[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        scores = torch.matmul(input=q, other=k.transpose(dim0=-1, dim1=-2)) * HEAD_DIM**-0.5
        weights = F.softmax(input=torch.masked_fill(input=scores, mask=hide, value=-1e30), dim=-1)
        return torch.matmul(weights, other=v)

    def append(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.concatenate(tensors=[past, new], axis=2)


class EmbeddingOfTorch(Hooked):
    def positions(self, ids: Tensor, start: int) -> Tensor:
        return torch.embedding(self.table, torch.arange(start, start + ids.shape[1]))[None]


class PlacedInManyWays(EmbeddingOfTorch):
    def positions(self, ids: Tensor, start: int) -> Tensor:
        place, count = torch.arange(start, start + ids.shape[1]), torch.arange(ids.shape[1])
        starts = (
            torch.full_like(ids, start),
            torch.full_like(input=ids, fill_value=start),
            ids.new_full((1, 1), start),
        )
        x = super().positions(ids, start)
        for factor, first in enumerate(starts, 1):
            x = x + torch.sin((first + count)[..., None].float() * self.rates * factor)
        return x + self.table[:20].gather(0, place[:, None].expand(-1, HIDDEN))[None]  # to its last row


class OneDimensionalBias(SpeltOut):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5 + torch.arange(k.shape[2]) * 0.01
        return scores.softmax(-1) @ v


class SlicesThatTakeEverything(Hooked):
    def append(self, past: Tensor, new: Tensor) -> Tensor:
        none = 0 * HEADS
        return (
            torch.cat([past[..., none:, :], new], -2)[..., none:, :]
            .to(new.dtype)
            .view_as(torch.cat([past, new], 2))
        )


class FoldsHeads(Hooked):
    """As fairseq does: attention is of `[batch * num_heads, tokens, head_dim]`, the cache is viewed as that."""

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        sides = self.qkv[layer](x).chunk(3, -1)
        batch = len(x)
        q, k, v = (
            side.view(batch, -1, HEADS, HEAD_DIM).transpose(1, 2).reshape(batch * HEADS, -1, HEAD_DIM)
            for side in sides
        )
        if past is not None:
            k, v = (
                torch.cat([held.view(batch * HEADS, -1, HEAD_DIM), new], 1)
                for held, new in zip(past, (k, v), strict=True)
            )
        scores = torch.nan_to_num(torch.bmm(q, k.transpose(1, 2)) * HEAD_DIM**-0.5)
        weights = scores.masked_fill(hide, -torch.inf).softmax(-1)
        out = torch.bmm(weights, v).transpose(0, 1).reshape(-1, batch, HIDDEN).transpose(0, 1)
        return x + out, (k.view(batch, HEADS, -1, HEAD_DIM), v.view(batch, HEADS, -1, HEAD_DIM))


class FilledProbabilities(SpeltOut):
    """As in WeNet: a row that sees nothing has no probabilities."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        hide = hide.expand(q.shape[1], *hide.shape)
        scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(hide, -torch.inf)
        return scores.softmax(-1).masked_fill(hide, 0.0) @ v


class FilledWhereNaN(SpeltOut):
    """As in TransformerLens; the mask is compared with False."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill((~hide) == False, -torch.inf)  # noqa: E712
        weights = scores.softmax(-1)
        return torch.where(torch.isnan(weights), torch.zeros_like(weights), weights) @ v


class FoldsHeadsBehindTokens(Hooked):
    """As fairseq's own attention folds them: `[tokens, batch * num_heads, head_dim]` first."""

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch = len(x)
        sides = self.qkv[layer](x.transpose(0, 1)).chunk(3, -1)
        q, k, v = (side.contiguous().view(-1, batch * HEADS, HEAD_DIM).transpose(0, 1) for side in sides)
        if past is not None:
            k, v = (
                torch.cat([held.view(batch * HEADS, -1, HEAD_DIM), new], 1)
                for held, new in zip(past, (k, v), strict=True)
            )
        weights = (torch.bmm(q, k.transpose(1, 2)) * HEAD_DIM**-0.5).masked_fill(hide, -torch.inf).softmax(-1)
        out = torch.bmm(weights, v).transpose(0, 1).reshape(-1, batch, HIDDEN).transpose(0, 1)
        return x + out, (k.view(batch, HEADS, -1, HEAD_DIM), v.view(batch, HEADS, -1, HEAD_DIM))


class KeysPermutedOnce(Hooked):
    """Caches `[batch, kv_len, num_kv_heads, head_dim]`, and permutes keys for their product in one go."""

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (side.unflatten(2, (HEADS, HEAD_DIM)) for side in self.qkv[layer](x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        scores = (q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) * HEAD_DIM**-0.5).masked_fill(hide, -1e30)
        return x + (scores.softmax(-1) @ v.permute(0, 2, 1, 3)).transpose(1, 2).flatten(2), (k, v)

    def forward(self, ids: Tensor, past: Pairs | None = None, *more: Tensor) -> tuple[Any, ...]:
        start = 0 if past is None else past[0][0].shape[1]
        place = torch.arange(start + ids.shape[1])
        x = self.embed(ids) + self.positions(ids, start)
        x, pair = self.run_layer(0, x, place[start:, None] < place[None], None if past is None else past[0])
        return self.head(x), (pair,)


class ScaleOfNumPy(SpeltOut):
    """A model's number of NumPy is a tensor to Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = np.sqrt(HEAD_DIM)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / self.scale).masked_fill(hide, -1e30).softmax(-1) @ v


class OneMaskForAllHeads(Hooked):
    """Keys and values of a single head are repeated, and so is the mask."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q = torch.cat([q, 1.5 * q], 1)
        k, v = (side[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1, 2) for side in (k, v))
        hide = hide.repeat(1, 1, 1)[0]  # dimensions in front
        mask = (~hide)[None, None].expand(q.shape[0], q.shape[1], -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 1:3]


class HeadsRepeatedInTurn(SpeltOut):
    """Query heads 0 and 2 read the same KV head: keys and values are repeated one after the other."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q = torch.cat([q, 1.5 * q.flip(1)], 1)
        k, v = (side.repeat(1, 2, 1, 1) for side in (k, v))
        scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(hide, -1e30)
        return (scores.softmax(-1) @ v)[:, 1:3]


class TurnedUnderAMask(Hooked):
    """As many heads as the prompt has tokens, repeated in turn, under a mask of two dimensions."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q = torch.cat([q * (1 + i) for i in range(5)], 1)
        k, v = (side.repeat(1, 5, 1, 1) for side in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hide)[:, 1:3]


class RepeatedAndGrouped(Hooked):
    """KV heads repeated in turn, and SDPA groups the query heads of these once more."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q = torch.cat([q * (1 + i) for i in range(4)], 1)
        k, v = (side.repeat(1, 2, 1, 1) for side in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hide, enable_gqa=True)[:, 1:3]


class QueriesBeforeHeads(Hooked):
    """As DeepSeek's code has scores: `[batch, q_len, num_heads, kv_len]`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        q, k, v = (side.transpose(1, 2) for side in (q, k, v))
        scores = torch.einsum("bshd,bthd->bsht", q, k) * HEAD_DIM**-0.5
        scores += torch.zeros(hide.shape).masked_fill(hide, -1e30).unsqueeze(1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(q)
        return torch.einsum("bsht,bthd->bshd", weights, v).transpose(1, 2)


class OneViewOfTheQueries(SpeltOut):
    """A step's queries are `[batch * num_heads, 1, head_dim]` from their projection on."""

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if past is None:
            return super().run_layer(layer, x, hide, past)
        q, *sides = self.qkv[layer](x).chunk(3, -1)
        new = (side.view(len(x), 1, HEADS, HEAD_DIM).transpose(1, 2) for side in sides)
        k, v = (self.append(old, side) for old, side in zip(past, new, strict=True))
        scores = torch.bmm(q.reshape(-1, 1, HEAD_DIM), k.flatten(0, 1).mT) * HEAD_DIM**-0.5
        return x + torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(x.shape), (k, v)


class KeysTransposed(Hooked):
    """Caches values, and keys `[batch, num_kv_heads, head_dim, kv_len]`, which are repeated for groups of heads."""

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        sides = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (side.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for side in sides)
        k, v = k[:, ::2].mT, v[:, ::2]
        if past is not None:
            v, k = torch.cat([past[0], v], 2), torch.cat([past[1], k], 3)
        cached, k, v = (v, k), k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k * HEAD_DIM**-0.5).masked_fill(hide, -1e30)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), cached


class Stacked(SpeltOut):
    """Keys and values are one tensor, of a single layer."""

    def forward(self, ids: Tensor, past: Any = None, *more: Tensor) -> tuple[Any, ...]:
        logits, (pair,) = super().forward(ids, None if past is None else (tuple(past.unbind(0)),))
        return logits, torch.stack(pair)


class Checkpointed(Hooked):
    def run_layer(self, *args: Any) -> Any:
        return checkpoint(super().run_layer, *args, use_reentrant=False)


@pytest.mark.parametrize(
    "model",
    [
        ByKeyword,
        Checkpointed,
        KeysPermutedOnce,
        KeysTransposed,
        OneViewOfTheQueries,
        PlacedInManyWays,
        SlicesThatTakeEverything,
        Stacked,
    ],
)
def test_a_spelling_is_rewritten_and_compiled_once(
    model: type[Hooked], compiled_graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    assert equals_plain(model()) < 0.02
    assert compiled_graphs == [(2, 1)]
    assert not caplog.text


def tamed(x: Tensor) -> Tensor:
    """Of a size that stays the same from layer to layer, and that leaves attention to several tokens."""
    return 0.5 * F.layer_norm(x, (HIDDEN,))


SPELT = (
    FilledProbabilities,
    FilledWhereNaN,
    FoldsHeads,
    FoldsHeadsBehindTokens,
    HeadsRepeatedInTurn,
    TurnedUnderAMask,
    OneDimensionalBias,
    OneMaskForAllHeads,
    QueriesBeforeHeads,
)


def in_layers(*cases: tuple[Any, ...]) -> list[Any]:
    """Several in a layer each, and by night each alone."""
    alone = [each for case in cases for each in case]
    return [*cases, *(pytest.param((each,), marks=pytest.mark.nightly, id=each.__name__) for each in alone)]


@pytest.mark.parametrize("kinds", in_layers(SPELT))
def test_a_spelling_of_attention_is_rewritten_and_compiled_once(
    kinds: tuple[type[Hooked], ...], compiled_graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    class OfEach(Hooked):
        num_layers = len(kinds)

        def run_layer(self, layer: int, x: Tensor, *others: Any) -> Any:
            return kinds[layer].run_layer(self, layer, tamed(x), *others)

        def attend(self, layer: int, *others: Any) -> Tensor:
            return kinds[layer].attend(self, layer, *others)

    assert equals_plain(OfEach()) < 0.02
    assert compiled_graphs == [(2, len(kinds))]
    assert not caplog.text


def test_a_number_of_numpy_may_change(compiled_graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    model = ScaleOfNumPy()
    compiled = torch.compile(model, backend="specache", options=OPTIONS)
    for scale in (4.0, 2.0):
        model.scale = np.float64(scale)
        torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-4, atol=1e-4)
    assert compiled_graphs == [(2, 1)]
    assert not caplog.text


@pytest.mark.inductor_fails
def test_a_graph_that_inductor_fails_to_compile_runs_operator_by_operator() -> None:
    class ComparedWithTrue(SpeltOut):  # torch 2.13: "A Boolean argument can only be used in Eq and Ne"
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
            scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(hide == True, -torch.inf)  # noqa: E712
            return scores.softmax(-1) @ v

    compiled = torch.compile(
        ComparedWithTrue(), backend="specache", options={**OPTIONS, "lowering": "inductor"}
    )
    torch.testing.assert_close(logits(compiled), logits(ComparedWithTrue()), rtol=1e-3, atol=1e-3)


def as_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=bias.flatten(1, 2)[None])
    return out.view_as(q)


def as_rows_of_one_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    seen = (bias[0, 0] > -1e4).repeat(q.shape[2], 1)
    return F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=seen).view_as(q)


def as_rows_spelt_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q.flatten(2, 3) @ k.transpose(-1, -2) * HEAD_DIM**-0.5
    return ((scores + bias.flatten(1, 2)).softmax(-1) @ v).view_as(q)


def as_rows_but_masked_apart(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, q.shape[2:4]) * HEAD_DIM**-0.5 + bias
    return (scores.softmax(-1).flatten(2, 3) @ v).view_as(q)


def as_an_einsum(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = q.permute(0, 3, 1, 2, 4), k.transpose(1, 2), v.transpose(1, 2)
    scores = torch.einsum("bskgd,btkd->bkgst", q, k) * HEAD_DIM**-0.5 + bias
    return torch.einsum("bkgst,btkd->bskgd", scores.softmax(-1), v).permute(0, 2, 3, 1, 4)


def with_a_maximum(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.unsqueeze(2).transpose(-1, -2) * HEAD_DIM**-0.5 + bias
    return (scores - scores.amax(4, keepdim=True)).softmax(4) @ v.unsqueeze(2)


def in_five_dimensions(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :, None], v[:, :, None].expand(*q.shape[:3], -1, -1), bias)


def with_groups_first(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A head of each group reads the same KV head: of four heads 0 and 2 the first one."""
    q, bias = q.transpose(1, 2), bias.transpose(0, 1)
    return F.scaled_dot_product_attention(q, k[:, None], v[:, None], bias).transpose(1, 2)


@torch.no_grad()
def test_scores_that_look_like_groups_and_are_none() -> None:
    class Swaps(Hooked):
        """The same swap twice, undone; scores of folded heads that are swapped; probabilities that are joined."""

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
            q = (q.transpose(1, 2) * q.transpose(1, 2).sigmoid()).transpose(1, 2)
            folded = torch.bmm(k.flatten(0, 1), q.flatten(0, 1).transpose(1, 2)).transpose(1, 2)
            bias = torch.arange(folded.shape[0])[:, None, None] * 0.1 * torch.arange(k.shape[2])
            scores = (folded * HEAD_DIM**-0.5 + bias).view(*q.shape[:3], -1).masked_fill(hide, -1e30)
            weights = scores.softmax(-1)
            return weights @ v + 0 * torch.cat([weights, weights])[: len(q)].mean()

    assert equals_plain(Swaps()) < 0.02


BY_SDPA = (with_groups_first, as_rows, as_rows_of_one_mask, in_five_dimensions)
AS_PRODUCTS = (as_rows_spelt_out, as_rows_but_masked_apart, as_an_einsum, with_a_maximum)


@pytest.mark.parametrize("attentions", in_layers(BY_SDPA, AS_PRODUCTS))
def test_query_heads_in_groups(
    attentions: tuple[Callable[..., Tensor], ...], compiled_graphs: Graphs
) -> None:
    class Grouped(Hooked):
        """Two query heads of each KV head, each with a bias of its own."""

        num_layers = len(attentions)

        def run_layer(self, layer: int, x: Tensor, *others: Any) -> Any:
            return super().run_layer(layer, tamed(x), *others)

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
            slopes = torch.tensor([[0.5, 0.25], [0.1, 0.0]])[..., None, None]
            if attentions[layer] is as_rows_of_one_mask:
                slopes = torch.zeros(2, 2, 1, 1)
            bias = (slopes * torch.arange(k.shape[2])).masked_fill(hide, -1e30)
            one, other = attentions[layer](torch.stack([q, 1.5 * q.flip(-1)], 2), k, v, bias).unbind(2)
            return one - 0.5 * other

    assert equals_plain(Grouped()) < 0.02
    assert compiled_graphs == [(2, len(attentions))]


def test_the_speculative_token_finds_its_place_in_a_table_of_torch() -> None:
    """Indices are held inside the table for it, and the table is left as it is."""
    rates = []
    for model in (ByKeyword(), EmbeddingOfTorch()):
        torch._dynamo.reset()
        options = {**OPTIONS, "track_hit_rates": True, "top_k": 2}
        compiled = torch.compile(model, backend="specache", options=options)
        ids = torch.randint(89, (2, 10), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            out, past = compiled(ids)
            for _ in range(12):
                out, past = compiled(out[:, -1:].argmax(-1), past)
        rates.append(specache_fx.stats(past).topk_hit_rate)
    assert rates[0] == rates[1]


class TakesAllIds(Hooked):
    """Called with all ids in each step; of what it has embedded it keeps the newest."""

    def newest(self, ids: Tensor, past: Pairs | None) -> Tensor:
        x = self.embed(ids) * 2.0 + self.positions(ids, 0)
        return x if past is None else x[:, -1:]

    def forward(self, ids: Tensor, past: Pairs | None = None, *more: Tensor) -> tuple[Any, ...]:
        start = 0 if past is None else past[0][0].shape[2]
        x = embedded = self.newest(ids, past)
        place = torch.arange(start + x.shape[1])
        hide = place[start:, None] - place[None] < 0
        new = []
        for layer in range(self.num_layers):
            x, pair = self.run_layer(layer, x, hide, None if past is None else past[layer])
            new.append(pair)
        return self.head(x), tuple(new), embedded


class TakesAllIdsFirst(TakesAllIds):
    def newest(self, ids: Tensor, past: Pairs | None) -> Tensor:
        place = self.positions(ids, 0)
        return self.embed(ids) + place if past is None else self.embed(ids[:, -1:]) + place[:, -1:]


class ReturnsAllItEmbeds(TakesAllIds):
    def forward(self, ids: Tensor, past: Pairs | None = None, *more: Tensor) -> tuple[Any, ...]:
        return *super().forward(ids, past), self.embed(ids) * 3.0


class MixesAllItEmbeds(TakesAllIds):
    """What it keeps of the newest depends on the others: the ids can't be cut."""

    def newest(self, ids: Tensor, past: Pairs | None) -> Tensor:
        x = super().newest(ids, None).cumsum(1) * 0.2
        return x if past is None else x[:, -1:]


@pytest.mark.parametrize(
    ("kind", "lanes"),
    [(TakesAllIds, 2), (TakesAllIdsFirst, 2), (ReturnsAllItEmbeds, 2), (MixesAllItEmbeds, 1)],
)
def test_ids_of_the_whole_sequence_in_each_step(
    kind: type[TakesAllIds], lanes: int, compiled_graphs: Graphs
) -> None:
    def run(model: Callable[..., Any]) -> tuple[Tensor, Tensor, Any]:
        ids = torch.randint(89, (2, 10), generator=torch.Generator().manual_seed(1))
        past, found, last = None, [], None
        with torch.no_grad():
            for _ in range(12):
                out, past, *_, last = model(ids, past)
                found.append(out[:, -1])
                ids = torch.cat([ids, out[:, -1:].argmax(-1)], 1)
        return torch.stack(found), last, past

    plain, all_embedded, _ = run(kind())
    compiled, last, past = run(torch.compile(kind(), backend="specache", options=OPTIONS))
    assert plain.abs().mean() > 1 and (plain - compiled).abs().max() < 0.02
    torch.testing.assert_close(last, all_embedded, rtol=1e-4, atol=1e-4)
    assert set(compiled_graphs) == {(lanes, 1)}
    stats = specache_fx.stats(past)
    assert stats.kv_len == 21
    if lanes == 2:
        assert len(compiled_graphs) == 1 and stats.exact_hit_rate == 1.0


def test_further_inputs_are_no_mask_and_no_position() -> None:
    class Conditioned(Hooked):
        def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
            numbers, flags = more
            x = x + numbers.float().mean() * 0.1
            return torch.where(flags[..., None], x, x * 0.5)

    def more(q_len: int) -> tuple[Tensor, ...]:
        """Numbers to condition on, and a flag for each token."""
        return torch.tensor([[1, 2, 3, 4]] * 2), torch.arange(2 * q_len).view(2, q_len) % 2 == 0

    assert equals_plain(Conditioned(), more) < 0.02


class MaskGiven(Hooked):
    """Its caller makes the mask, `[batch, 1, q_len, kv_len]`."""

    def forward(self, ids: Tensor, past: Pairs | None = None, *more: Tensor) -> tuple[Any, ...]:
        x = self.embed(ids) + self.positions(ids, 0 if past is None else past[0][0].shape[2])
        x, pair = self.run_layer(0, x, more[0], None if past is None else past[0])
        return self.head(x), (pair,)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hide)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_over_queries_and_keys_is_an_input(dtype: torch.dtype, compiled_graphs: Graphs) -> None:
    length = 0

    def mask(q_len: int) -> tuple[Tensor]:
        nonlocal length
        length = q_len if q_len > 1 else length + 1
        shown = torch.ones(2, 1, q_len, length, dtype=torch.bool).tril(length - q_len)
        shown[1, :, :, :3] = False  # padding
        shown[1, :, :3, :3] = torch.eye(3, dtype=torch.bool)[: min(q_len, 3)]
        return (shown if dtype == torch.bool else torch.zeros(shown.shape).masked_fill(~shown, -1e30),)

    assert equals_plain(MaskGiven(), mask) < 0.02
    assert compiled_graphs == [(2, 1)]


@torch.no_grad()
@pytest.mark.parametrize("buffers", nightly_unless(False.__eq__, [False, True]))
def test_a_second_piece_of_a_prompt_brings_its_mask(buffers: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Buffered(MaskGiven):
        num_layers = 1

        def run_layer(self, layer: int, x: Tensor, hide: Tensor, past: Any) -> Any:
            q, k, v = (
                side.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2) for side in self.qkv[0](x).chunk(3, -1)
            )
            for held, new in zip((self.k, self.v), (k, v), strict=True):
                held.index_copy_(2, self.at, new)
            return x + self.attend(0, q, self.k, self.v, hide).transpose(1, 2).flatten(2), (q, q)

    def run(model: Any, inner: Any) -> Tensor:
        inner.k, inner.v = (torch.zeros(2, HEADS, 64, HEAD_DIM) for _ in range(2))
        ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
        shown, past, found = torch.ones(64, 64, dtype=torch.bool).tril().expand(2, 1, 64, 64), None, []
        for start, end in ((0, 20), (20, 37), (37, 38), (38, 39), (39, 40)):
            inner.at = torch.arange(start, end)
            mask = shown[:, :, start:end, : 64 if buffers else end]
            out, past, *_ = model(ids[:, start:end], None if buffers else past, mask)
            found.append(out[:, -1])
        return torch.stack(found)

    kind = Buffered if buffers else MaskGiven
    plain, model = kind(), kind()
    expected = run(plain, plain)
    compiled = torch.compile(model, backend="specache", options={**OPTIONS, "lowering": "inductor"})
    torch.testing.assert_close(run(compiled, model), expected, rtol=1e-3, atol=1e-3)
    assert "Inductor fails" not in caplog.text


class ChannelsFirst(Hooked):
    """Caches `[batch, channels, kv_len]`."""

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.qkv[layer](x).mT.chunk(3, 1)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        heads = (side.unflatten(1, (HEADS, HEAD_DIM)).mT for side in (q, k, v))
        return x + self.attend(layer, *heads, hide).transpose(1, 2).flatten(2), (k, v)  # type: ignore[call-arg]


_APART = r"Cache keys and values apart, each as \[batch, num_kv_heads, kv_len, head_dim\]"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (ChannelsFirst, _APART),
    ],
)
def test_a_cache_in_a_form_of_its_own_is_named(
    model: type[Hooked], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert equals_plain(model()) == 0
    assert re.search(told, caplog.text)


class CrossAttention(Hooked):
    """Reads another sequence too, which may be as long as the prompt."""

    def hidden(self, x: Tensor, *more: Tensor) -> Tensor:
        self.other = more[0]
        return x

    def run_layer(
        self, layer: int, x: Tensor, hide: Tensor, past: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Any]:
        x, pair = super().run_layer(layer, x, hide, None if past is None else past[:2])  # type: ignore[arg-type]
        q = self.qkv[layer](x)[..., :HIDDEN].unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
        if past is None:
            sides = self.qkv[layer](self.other)[..., HIDDEN:].chunk(2, -1)
            cross = tuple(side.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2) for side in sides)
        else:
            cross = past[2:]
        return x + F.scaled_dot_product_attention(q, *cross).transpose(1, 2).flatten(2), (*pair, *cross)


@pytest.mark.parametrize("length", nightly_unless((10).__eq__, [7, 10]))
def test_keys_of_another_sequence_are_no_cache_of_this_one(
    length: int, caplog: pytest.LogCaptureFixture, compiled_graphs: Graphs
) -> None:
    other = torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(5))
    assert equals_plain(CrossAttention(), lambda q_len: (other,)) < 0.02
    assert "cross-attention" in caplog.text and compiled_graphs == [(2, 1)]


@pytest.mark.parametrize("first", ["data", "positions"])
def test_random_numbers_are_drawn_in_the_models_order(first: str) -> None:
    class Noisy(Hooked):
        def positions(self, ids: Tensor, start: int) -> Tensor:
            return torch.randn_like(super().positions(ids, start))

        def forward(self, ids: Tensor, past: Pairs | None = None, *more: Tensor) -> tuple[Any, ...]:
            x, start = self.embed(ids), 0 if past is None else past[0][0].shape[2]
            if first == "data":
                x = x + torch.randn_like(x)
                x = x + self.positions(ids, start)
            else:
                place = self.positions(ids, start)
                x = x + place + torch.randn_like(x)
            place = torch.arange(start + ids.shape[1])
            hide = place[start:, None] - place[None] < 0
            x, pair = self.run_layer(0, x, hide, None if past is None else past[0])
            return self.head(F.rrelu(x, training=True)), (pair,)

    torch.manual_seed(0)
    plain = logits(Noisy())
    torch.manual_seed(0)
    compiled = logits(torch.compile(Noisy(), backend="specache", options=OPTIONS))
    assert (plain - compiled).abs().max() < 0.02


def test_sessions_of_a_thread_that_ended_are_freed_by_the_next_sweep() -> None:
    model = torch.compile(Hooked(), backend="specache", options=OPTIONS)
    logits(model, steps=1)
    registry.sweep()
    with all_end() as made:
        thread = threading.Thread(target=logits, args=(model,), kwargs={"steps": 1})
        thread.start()
        thread.join()
        registry.sweep()
    assert len(made) == 1


class KeptInBuffers(Hooked):
    """Grows its cache in buffers of its own; a call without `past` begins anew."""

    num_layers = 2

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys0", "values0", "keys1", "values1"):
            self.register_buffer(name, None, persistent=False)

    def forward(self, ids: Tensor, past: Any = None, *more: Tensor) -> tuple[Any, ...]:
        kept = [getattr(self, name) for name in ("keys0", "values0", "keys1", "values1")]
        pairs = None if past is None else ((kept[0], kept[1]), (kept[2], kept[3]))
        out, (first, second) = super().forward(ids, pairs)
        self.keys0, self.values0, self.keys1, self.values1 = *first, *second
        return out, True

    def look(self) -> Tensor:
        return self.keys0.mean() + self.values1.mean()


@pytest.mark.parametrize("static", [True, False], ids=["static sizes", "any sizes"])
def test_a_cache_that_grows_in_buffers(static: bool, compiled_graphs: Graphs) -> None:
    plain, model = KeptInBuffers(), KeptInBuffers()
    with torch._dynamo.config.patch(force_parameter_static_shapes=static):
        found = logits(torch.compile(model, backend="specache", options=OPTIONS), steps=10)
        assert torch._dynamo.config.force_parameter_static_shapes == static
    torch.testing.assert_close(found, logits(plain, steps=10), rtol=1e-4, atol=1e-4)
    assert specache_fx.stats(model.keys0).kv_len == 20
    # Numbers, not placeholders, for a graph that reads the buffers alone.
    with torch.no_grad():
        looked = torch.compile(model.look, backend="specache", options=OPTIONS)()
        torch.testing.assert_close(looked, plain.look(), rtol=1e-4, atol=1e-4)
    assert compiled_graphs == [(2, 2)]


def with_mode(mode: Any, *methods: str) -> Hooked:
    """A model whose weights ask for gradients, and that turns them off in some of its methods."""
    names = {name: mode()(getattr(Hooked, name)) for name in methods}
    return type("WithMode", (Hooked,), names)().requires_grad_()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_that_turns_gradients_off_by_itself(mode: Any, compiled_graphs: Graphs) -> None:
    model = with_mode(mode, "forward")
    with torch.enable_grad():
        run = logits.__wrapped__  # type: ignore[attr-defined]
        found = run(torch.compile(model, backend="specache", options={**OPTIONS, "strict": True}))
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)
    assert compiled_graphs == [(2, 1)] and not found.requires_grad


def test_gradients_that_a_model_turns_on_by_itself_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = with_mode(torch.enable_grad, "forward")
    with torch.no_grad():
        out, _ = torch.compile(model, backend="specache", options=OPTIONS)(torch.arange(10)[None])
    out.sum().backward()
    assert model.head.weight.grad is not None and "gradients are enabled" in caplog.text


def test_gradients_that_are_off_in_a_part_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = with_mode(torch.no_grad, "positions", "hidden")
    out, _ = torch.compile(model, backend="specache", options=OPTIONS)(torch.arange(10)[None])
    assert out.requires_grad and "gradients are enabled" in caplog.text


class ReturnsMore(Hooked):
    """Returns its mask too, numbers that no token goes into, and a tensor as long as the cache."""

    def forward(self, ids: Tensor, past: Pairs | None = None, *more: Tensor) -> tuple[Any, ...]:
        start = 0 if past is None else past[0][0].shape[2]
        out, new = super().forward(ids, past)
        mask = torch.ones(len(ids), start + ids.shape[1], dtype=torch.bool)
        return out, new, mask, self.head.weight.norm(dim=1), torch.ones(len(ids), new[0][0].shape[2])


@torch.no_grad()
def test_outputs_beside_logits_and_cache(compiled_graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    plain = ReturnsMore()
    ours = torch.compile(ReturnsMore(), backend="specache", options=OPTIONS)
    ids = torch.arange(16)[None]
    (_, past, *_), (_, expected, *_) = ours(ids[:, :6]), plain(ids[:, :6])
    for place in range(6, 16):
        token = ids[:, place : place + 1]
        (out, past, *rest), (wanted, expected, *others) = ours(token, past), plain(token, expected)
        torch.testing.assert_close([out, *rest], [wanted, *others], rtol=1e-4, atol=1e-4)
    assert compiled_graphs == [(2, 1)]
    assert not caplog.text


class KeysBesideValues(Hooked):
    """A layer caches keys and values in one tensor, `[batch, heads, kv_len, 2 * head_dim]` here."""

    dim = -1

    def run_layer(self, layer: int, x: Tensor, hide: Tensor, past: Any) -> Any:
        sides = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (side.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in sides)
        pair = torch.cat([k, v], self.dim)
        pair = pair if past is None else torch.cat([past[0], pair], 2)
        k, v = pair.chunk(2, self.dim)
        return x + self.attend(layer, q, k, v, hide).transpose(1, 2).flatten(2), (pair, x)


class KeysBeforeValues(KeysBesideValues):
    dim = 1


@pytest.mark.parametrize("kind", [KeysBesideValues, KeysBeforeValues])
def test_keys_and_values_in_one_tensor_are_left_alone_and_told_of_once(
    kind: type[Hooked], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="specache_fx"):
        assert equals_plain(kind()) == 0.0
    (record,) = caplog.records
    assert "test_spellings.py" in record.message or "hooked.py" in record.message
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="is left alone"):
        logits(torch.compile(kind(), backend="specache", options={**OPTIONS, "strict": True}))
