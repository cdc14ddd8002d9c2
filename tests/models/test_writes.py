"""Models that write in place, in every way and to everything: masks, positions, data, buffers; prompts and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import nightly_unless
from support.ways import own_loop
from support.zoo import TWO_LANES, build
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import specache_fx
from specache_fx import UnsupportedGraphError
from specache_fx.runners import decode_runner

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Write = Callable[[Tensor], Any]
NEW_TOKENS = 10

# Each changes x, float32, at least `[..., 16]`. In this order none makes another one needless.
WRITES: dict[str, Write] = {
    "flag": lambda x: F.relu(x, inplace=True),
    "augmented": lambda x: x.__iadd__(0.3),
    "method of a view": lambda x: x[..., ::2].sub_(0.6),
    "flag of a module": nn.ReLU(inplace=True),
    "two": lambda x: (x[..., :16].add_(0.4), x[..., 16:].sub_(0.4)),
    "by keyword": lambda x: F.relu(input=x, inplace=True),
    "method": lambda x: x.mul_(0.5),
    "item": lambda x: x.__setitem__((..., slice(0, 8)), 0.5),
    "augmented item": lambda x: x[..., :8].__imul__(2),
    "chunk": lambda x: x.chunk(2, -1)[0].mul_(2.0),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "out": lambda x: torch.mul(x, 0.5, out=x),
    "copy": lambda x: x.copy_(x * 0.5),
    "index": lambda x: x.index_add_(x.dim() - 1, torch.tensor([0, 3]), x[..., :2].clone()),
    "dropout that is off": lambda x: F.dropout(x, 0.1, False).mul_(2),
    "cast to the same": lambda x: x.float().mul_(1.5),
    "broadcast": lambda x: torch.broadcast_tensors(x, x)[1].copy_(x.detach() * 1.5),
}


def in_turn(names: Sequence[str]) -> Write:
    return lambda x: [WRITES[name](x) for name in names]


class Writing(nn.Module):
    """One attention; `where` says to what `write` is applied."""

    def __init__(self, where: str, write: Write) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.where, self.write = where, write
        self.embed, self.qkv, self.head = nn.Embedding(89, 32), nn.Linear(32, 96), nn.Linear(32, 89)
        self.register_buffer("rates", torch.arange(1, 33) * 0.05)
        self.register_buffer("calls", torch.zeros(32))
        for parameter in self.parameters():
            parameter.data.normal_(std=0.5, generator=generator)
        self.eval().requires_grad_(False)

    def _apply_write(self, where: str, x: Tensor) -> None:
        if where == self.where:
            self.write(x)

    def forward(
        self, ids: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        start = 0 if past is None else past[0].shape[2]
        position = torch.arange(start, start + ids.shape[1])
        x = self.embed(ids)
        self._apply_write("data", x)
        if self.where == "counter":
            self.calls.add_(1)
        if self.where == "buffer":
            self.rates.copy_(torch.where(position.max() > 14, 2.0, 1.0) * torch.arange(1, 33) * 0.05)
        angles = torch.sin(position[:, None].float() * self.rates)[None]
        if self.where == "fresh":  # as everyone writes sinusoids
            angles, both = torch.zeros(1, ids.shape[1], 32), angles
            angles[..., 0::2] = both[..., 0::2]
            angles[..., 1::2] = both[..., 1::2].cos()
        if self.where == "cast of positions":
            moved = position.long()
            moved.mul_(3)
            angles = torch.sin(position[:, None].float() * self.rates)[None]
        self._apply_write("positions", angles)
        x = x + angles + self.calls
        q, k, v = (side.view(*ids.shape, 2, 16).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        if past is not None:
            new = k
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            if self.where == "new keys":
                new.mul_(3)
        distance = position[:, None] - torch.arange(k.shape[2])[None]
        mask = torch.zeros(distance.shape)
        mask.masked_fill_(distance < 0, -torch.inf)
        if self.where == "mask":
            mask.sub_(0.3 * distance.abs())
            mask[:, 3] -= 1.0
        if self.where == "window":
            mask.masked_fill_(distance >= 6, -torch.inf)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(out.transpose(1, 2).flatten(2) + x), (k, v)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.randint(89, (2, 10), generator=torch.Generator().manual_seed(1))
    out, past = model(ids)
    found = [out[:, -1]]
    for i in range(NEW_TOKENS):
        out, past = model(torch.tensor([[3 + i], [7 + i]]), past)
        found.append(out[:, -1])
    return torch.stack(found)


def named(told: str | tuple[str, ...]) -> str:
    return told if isinstance(told, str) else "all" if len(told) > 1 else "".join(told) or "-"


DAILY = [
    ("positions", tuple(WRITES)),
    ("data", tuple(name for name in WRITES if name != "foreach")),
    ("data", ("foreach",)),
    *((where, ()) for where in ("mask", "window", "buffer", "counter", "fresh", "cast of positions")),
]
CASES = [
    *DAILY,
    *((where, (name,)) for where in ("positions", "data") for name in WRITES if name != "foreach"),
]
# With one lane: a state moves once a step, and `vmap` knows no `foreach`. `strict` would refuse that.
ONE_LANE = (("buffer", ()), ("counter", ()), ("data", ("foreach",)))


@pytest.mark.parametrize(
    "lookahead", nightly_unless(lambda lookahead: lookahead == "token", ["token", "query"])
)
@pytest.mark.parametrize(("where", "names"), nightly_unless(DAILY.__contains__, CASES), ids=named)
def test_a_write_is_seen_by_what_reads_after_it(where: str, names: tuple[str, ...], lookahead: str) -> None:
    write = in_turn(names)
    expected = logits(Writing(where, write))
    strict = lookahead == "query" or (where, names) not in ONE_LANE
    options = {**TWO_LANES, "bits": 16, "lookahead": lookahead, "strict": strict}
    found = logits(torch.compile(Writing(where, write), backend="specache", options=options))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_every_write_changes_the_logits() -> None:
    for where, names in CASES:
        written = logits(Writing(where, in_turn(names)))
        for left_out in names or ("",):
            others = [name for name in names if name != left_out]
            without = logits(Writing(where if names else "", in_turn(others)))
            assert (written - without).abs().max() > 0.05, (where, names, left_out)


@pytest.mark.parametrize("fresh", [False, True], ids=["computed", "written into a fresh tensor"])
def test_positions_may_be_read_before_all_of_them_are_written(
    fresh: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Early(Writing):
        def forward(self, ids: Tensor, past: Any = None) -> Any:
            start = 0 if past is None else past[0].shape[2]
            angles = torch.sin(torch.arange(start, start + ids.shape[1])[:, None].float() * self.rates)[None]
            if fresh:
                angles = torch.zeros(1, ids.shape[1], 32).add_(angles)
            x = self.embed(ids) + angles
            angles.mul_(3)
            q, k, v = (
                side.view(*ids.shape, 2, 16).transpose(1, 2) for side in self.qkv(x + angles).chunk(3, -1)
            )
            if past is not None:
                k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
            return self.head(out.transpose(1, 2).flatten(2) + x), (k, v)

    expected = logits(Early("", lambda x: None))
    found = logits(
        torch.compile(Early("", lambda x: None), backend="specache", options={**TWO_LANES, "bits": 16})
    )
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    assert not caplog.text


def test_new_keys_may_be_written_to_after_they_were_appended(caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(Writing("new keys", lambda x: None))
    model = torch.compile(
        Writing("new keys", lambda x: None), backend="specache", options={**TWO_LANES, "bits": 16}
    )
    torch.testing.assert_close(logits(model), expected, rtol=2e-4, atol=2e-4)
    assert not caplog.text


def test_sinusoids_in_a_fresh_tensor_are_compiled_once() -> None:
    model = Writing("fresh", lambda x: None)
    compiled = torch.compile(model, backend="specache", options={**TWO_LANES, "bits": 16, "strict": True})
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        counted: list[int] = []
        lower = decode_runner.lower_static
        patch.setattr(
            decode_runner, "lower_static", lambda *args, **more: (counted.append(1), lower(*args, **more))[1]
        )
        logits(compiled)
    assert len(counted) <= 2


def test_a_rope_that_changes_on_the_way_equals_eager() -> None:
    """LongRoPE of transformers copies other frequencies into a buffer once the context exceeds the original one."""
    rope = {
        "rope_type": "longrope",
        "factor": 2.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 20,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0 + i for i in range(8)],
    }
    prompt = torch.randint(5, 90, (1, 10), generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        model = build("llama", max_position_embeddings=64, rope_parameters=dict(rope))
        if compiled:
            model.compile(backend="specache", options={**TWO_LANES, "bits": 16})
        found.append(own_loop(model, prompt, 20))
    torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_autocast_is_in_the_graph(around: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Inside(Writing):
        def forward(self, ids: Tensor, past: Any = None) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids, past)

    def run(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            return logits(model)

    kind = Writing if around else Inside
    expected = run(kind("", lambda x: None))
    plain = logits(Writing("", lambda x: None))
    options = {**TWO_LANES, "bits": 16, "strict": True}
    found = run(torch.compile(kind("", lambda x: None), backend="specache", options=options))
    assert found.dtype == expected.dtype == torch.bfloat16
    # No further from float32 than the model's own rounding, and nearer to the model.
    wanted, ours, apart = (
        float((one.float() - other.float()).abs().mean())
        for one, other in ((expected, plain), (found, plain), (found, expected))
    )
    assert ours < 1.2 * wanted and apart < wanted
    assert "left alone" not in caplog.text and "not possible" not in caplog.text


def test_autocast_that_is_turned_off_where_it_is_off_means_nothing() -> None:
    class Outside(Writing):
        def forward(self, ids: Tensor, past: Any = None) -> Any:
            with torch.autocast("cpu", enabled=False):
                return super().forward(ids, past)

    expected = logits(Outside("", lambda x: None))
    options = {**TWO_LANES, "bits": 16, "strict": True}
    model = torch.compile(Outside("", lambda x: None), backend="specache", options=options)
    torch.testing.assert_close(logits(model), expected, rtol=2e-4, atol=2e-4)
    with torch.no_grad():
        assert specache_fx.stats(model(torch.arange(9)[None])[1]).kv_len == 9


@pytest.mark.parametrize("lookahead", nightly_unless("token".__eq__, ["token", "query"]))
def test_random_numbers_are_drawn_as_often_as_by_the_model(lookahead: str) -> None:
    class Noisy(Writing):
        def forward(self, ids: Tensor, past: Any = None) -> Any:
            out, past = super().forward(ids, past)
            return out + torch.randn_like(out) * 0.1, past

    def run(model: Any) -> Tensor:
        torch.manual_seed(5)
        return logits(model)

    expected = run(Noisy("", lambda x: None))
    options = {**TWO_LANES, "bits": 16, "lookahead": lookahead, "strict": lookahead == "query"}
    found = run(torch.compile(Noisy("", lambda x: None), backend="specache", options=options))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("where", "names"), ONE_LANE, ids=named)
def test_strict_refuses_to_lose_the_second_lane(where: str, names: tuple[str, ...]) -> None:
    compiled = torch.compile(
        Writing(where, in_turn(names)), backend="specache", options={**TWO_LANES, "strict": True}
    )
    with pytest.raises((UnsupportedGraphError, BackendCompilerFailed), match='Take lookahead="query"'):
        logits(compiled)
