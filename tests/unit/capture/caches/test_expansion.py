"""Keys and values that are computed from what is cached: what is taken, what is refused and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import graphs
from support.cases import nightly_unless
from torch import Tensor, nn

from specache_fx.capture.graph.graph_utils import placeholders
from specache_fx.capture.program import Program
from specache_fx.runtime.graph.expansion import Expansion

Expand = Callable[["Latent", Tensor, Tensor], Any]
BATCH, HEADS, ROPE, LATENT, NOPE, VALUE = 2, 4, 16, 20, 6, 12


class Latent(nn.Module):
    """One attention over what `expand` makes of a cached rotary key and a latent."""

    def __init__(self, expand: Expand) -> None:
        super().__init__()
        self.expand = expand
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=generator) / LATENT**0.5
        self.up = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(LATENT, generator=generator), requires_grad=False)

    def forward(self, q: Tensor, k: Tensor, c: Tensor, past_k: Tensor, past_c: Tensor) -> Any:
        keys, latents = torch.cat([past_k, k], dim=-2), torch.cat([past_c, c], dim=-2)
        read_k, read_v, *more = self.expand(self, keys, latents)
        return F.scaled_dot_product_attention(q, read_k, read_v), keys, latents, *more


def up_projected(model: Latent, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, tokens, _ = latents.shape
    up = F.linear(latents, model.up).view(batch, tokens, HEADS, -1).transpose(1, 2)
    nope, values = up.split([NOPE, VALUE], dim=-1)
    return torch.cat([nope, keys.expand(-1, HEADS, -1, -1)], dim=-1), values


def written_in_place(model: Latent, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, tokens, _ = latents.shape
    up = F.linear(latents, model.up).view(batch, tokens, HEADS, -1).transpose(1, 2)
    nope, values = up.split([NOPE, VALUE], dim=-1)
    out = nope.new_empty(*nope.shape[:-1], NOPE + ROPE)
    out[..., :NOPE].copy_(nope)
    out[..., NOPE:].copy_(keys.expand(-1, HEADS, -1, -1))
    return out, values


def nonlinear(model: Latent, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    return up_projected(model, torch.tanh(keys), F.silu(latents + model.bias))


def viewed_as_rows(model: Latent, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, tokens, _ = latents.shape
    up = (latents.reshape(batch * tokens, LATENT) @ model.up.T).view(batch, tokens, HEADS, -1)
    nope, values = up.transpose(1, 2).split([NOPE, VALUE], dim=-1)
    return torch.cat([nope, keys.expand(batch, HEADS, tokens, ROPE)], dim=-1), values


def rotated_after_caching(model: Latent, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.arange(keys.shape[2], dtype=keys.dtype)[:, None]
    return up_projected(model, keys * angles.cos(), latents)


def of_one_of_them(model: Latent, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, tokens, _ = latents.shape
    up = F.linear(latents, model.up).view(batch, tokens, HEADS, -1).transpose(1, 2)
    return up[..., :NOPE], up[..., NOPE:]


def inputs(past: int, query_dim: int = NOPE + ROPE, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(past)
    sizes = ((HEADS, 1, query_dim), (1, 1, ROPE), (1, 1, LATENT), (1, past, ROPE), (1, past, LATENT))
    return tuple(torch.randn(BATCH, *size, generator=generator).to(dtype) for size in sizes)


def matched(
    model: Latent, *pasts: int, query_dim: int = NOPE + ROPE, dtype: torch.dtype = torch.float32
) -> Program:
    """What is made of the last graph of calls with so many past tokens."""

    def drive(forward: Any) -> None:
        for past in pasts:
            forward(*inputs(past, query_dim, dtype))

    return graphs.matched(graphs.capture(model, drive)[-1])


def expansion_of(model: Latent, program: Program) -> Expansion:
    (site,) = program.sites
    assert not program.refusals
    assert site.shape[:3] == (1, ROPE, LATENT)
    assert site.expansion is not None
    return site.expansion


def check(model: Latent, expand: Expand, program: Program, tokens: int) -> None:
    expansion = expansion_of(model, program)
    names = {"up": model.up, "bias": model.bias}
    inputs = placeholders(program.sites[0].core.node.graph)
    args = [
        next((names[n] for n in names if each.name.endswith(f"parameters_{n}_")), None) for each in inputs
    ]
    keys, latents = torch.randn(BATCH, 1, tokens, ROPE), torch.randn(BATCH, 1, tokens, LATENT)
    before = keys.clone(), latents.clone()
    ours = expansion.bind(args)(keys, latents)
    for mine, truth in zip(ours, expand(model, keys, latents), strict=True):
        torch.testing.assert_close(mine, truth)
    assert torch.equal(keys, before[0]) and torch.equal(latents, before[1])


@pytest.mark.parametrize("expand", [up_projected, written_in_place, nonlinear, viewed_as_rows])
@pytest.mark.parametrize("pasts", [(5,), (5, 9)], ids=["one length", "any length"])
def test_what_is_computed_token_by_token_is_cut_out(expand: Expand, pasts: tuple[int, ...]) -> None:
    model = Latent(expand)
    program = matched(model, *pasts)
    for tokens in (1, 4, 6, 17):
        check(model, expand, program, tokens)
    assert expansion_of(model, program).chunk is None


@pytest.mark.parametrize("kv_len", [BATCH, HEADS, NOPE, VALUE, LATENT, NOPE + VALUE, NOPE + ROPE])
@pytest.mark.parametrize("expand", [up_projected, written_in_place, viewed_as_rows])
def test_a_length_that_is_another_size_too_is_not_mistaken(expand: Expand, kv_len: int) -> None:
    # Dynamo's first decode graph has the length as a constant, which may be that of the batch, heads or channels.
    model = Latent(expand)
    program = matched(model, kv_len - 1)
    for tokens in (1, kv_len, kv_len + 3, 2 * kv_len):
        check(model, expand, program, tokens)


DEPENDS = "what becomes of a token depends on"
REFUSED: list[tuple[Expand, str]] = [
    (rotated_after_caching, f"{DEPENDS} its place"),
    (lambda model, k, c: up_projected(model, k, c.cumsum(2)), DEPENDS),
    (lambda model, k, c: up_projected(model, k, c / c.norm(dim=2, keepdim=True)), DEPENDS),
    (
        lambda model, k, c: up_projected(model, k, c - 0.2 * c[:, :, -1:]),
        "it reads some of the tokens that are cached",
    ),
    (lambda model, k, c: up_projected(model, k, c - 0.2 * c.select(2, -1).unsqueeze(2)), DEPENDS),
    (
        lambda model, k, c: up_projected(model, k, c * (100 / c.norm()).clamp(max=1)),
        f"{DEPENDS} other tokens",
    ),
    (lambda model, k, c: up_projected(model, k, c - c[:1]), f"{DEPENDS} its place"),
    (lambda model, k, c: (*(read := up_projected(model, k, c)), read[1].sum()), "reads its `values` too"),
    (
        lambda model, k, c: (*up_projected(model, k, c), c.square().mean()),
        "its values are also used by `square`",
    ),
    (of_one_of_them, "which is not a pair of tensors"),
]


@pytest.mark.parametrize(("expand", "reason"), REFUSED)
@pytest.mark.parametrize(
    "dtype", nightly_unless(lambda dtype: dtype == torch.float32, [torch.float32, torch.bfloat16]), ids=str
)
@pytest.mark.parametrize("pasts", [(5,), (5, 9)], ids=["one length", "any length"])
def test_what_is_not_is_refused(
    expand: Expand, reason: str, pasts: tuple[int, ...], dtype: torch.dtype
) -> None:
    query_dim = NOPE if expand is of_one_of_them else NOPE + ROPE
    program = matched(Latent(expand).to(dtype), *pasts, query_dim=query_dim, dtype=dtype)
    assert not program.sites
    (refusal,) = program.refusals
    assert reason in refusal.reason, refusal.reason
    assert "scaled_dot_product_attention" in refusal.source


def test_a_factor_of_the_number_of_tokens_is_refused() -> None:
    def scaled(model: Latent, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        return up_projected(model, keys, latents * (keys.shape[2] / 10))

    (refusal,) = matched(Latent(scaled), 5, 9).refusals
    assert "what becomes of a token depends on how many there are" in refusal.reason


def test_a_refusal_names_the_lines_in_between() -> None:
    (refusal,) = matched(Latent(rotated_after_caching), 5).refusals
    assert "return up_projected(model, keys * angles.cos(), latents)" in refusal.reason
    assert "cache what attention reads" in refusal.remedy
