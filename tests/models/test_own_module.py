"""A plain `nn.Module` that keeps its own past KV, and the ways into the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.own_modules import VOCAB_SIZE, OwnConfig, OwnDecoder
from support.zoo import TWO_LANES, build, left_padded
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import specache_fx
from specache_fx import CacheHandleError, ConfigError, UnsupportedGraphError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EXACT = {"rtol": 2e-4, "atol": 2e-4}
OPTIONS = {**TWO_LANES, "bits": 16}
Past = Sequence[tuple[Tensor, Tensor]]


def own(odd_scores: bool = False) -> OwnDecoder:
    """Learned positions, multi-head attention, tied embeddings."""
    model = OwnDecoder(OwnConfig("gpt", num_kv_heads=4, odd_scores=odd_scores))
    model.head.weight = model.embed.weight
    return model


def by_torch_compile(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="specache", options={**OPTIONS, **options})


def by_method(module: nn.Module, **options: Any) -> Any:
    module.compile(backend="specache", options={**OPTIONS, **options})
    return module


def by_specache(module: nn.Module, **options: Any) -> Any:
    return specache_fx.compile(module, **{**OPTIONS, **options})


def by_specache_on_wrapper(module: nn.Module, **options: Any) -> Any:
    return specache_fx.compile(torch.compile(module, backend="specache", options={**OPTIONS, **options}))


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (2, count), generator=torch.Generator().manual_seed(seed))


TURNS = ((21, 20), (6, 12), (1, 10), (9, 2))


@torch.no_grad()
def drive(model: Callable[..., Any]) -> tuple[list[Tensor], Past]:
    """Prompt, decode, extend, decode, crop by slicing, decode, extend: the logits of every call."""
    found: list[Tensor] = []
    past: Past = ()
    for turn, (count, steps) in enumerate(TURNS):
        if turn == 2:
            past = [(k[:, :, :-17], v[:, :, :-17]) for k, v in past]
        for step in range(steps + 1):
            ids = tokens(1 if step else count, seed=100 * turn + step)
            length = ids.shape[1] + (past[0][0].shape[2] if past else 0)
            logits, past = model(ids, torch.ones(2, length, dtype=torch.bool), *([past] if past else []))
            found.append(logits)
    return found, past


def test_own_module_equals_itself_uncompiled() -> None:
    expected, plain_past = drive(own())
    found, past = drive(by_torch_compile(own()))
    torch.testing.assert_close(found, expected, **EXACT)
    stats = specache_fx.stats(past)
    assert stats.kv_len == plain_past[0][0].shape[2] == past[0][0].shape[2]
    assert stats.full_bytes == sum(k.nbytes + v.nbytes for k, v in plain_past)
    assert 0 < stats.host_used_bytes <= stats.host_bytes
    assert stats.steps == 45 and stats.prefetched_rows > 0


# Refusals -----------------------------------------------------------------------------------------------------------


def test_strict_raises_what_stands_in_the_way() -> None:
    model = by_torch_compile(own(odd_scores=True), strict=True)
    with pytest.raises(BackendCompilerFailed) as raised:
        drive(
            model
        )  # in a prompt's graph, nothing tells such keys from any other tensor: the first step says it
    inner = raised.value.inner_exception
    assert isinstance(inner, UnsupportedGraphError)
    assert "softmax" in str(inner) and 'backend="inductor"' in str(inner)
    assert "own_modules.py" in str(inner)  # the model's own line
    assert str(inner) in str(raised.value)


def cause(error: BaseException) -> BaseException:
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_mode_is_refused(mode: str) -> None:
    with pytest.raises((ConfigError, BackendCompilerFailed)) as raised, torch.no_grad():
        torch.compile(own(), backend="specache", mode=mode)(tokens(8, seed=0), None)
    error = cause(raised.value)
    assert isinstance(error, ConfigError)
    assert f"mode={mode!r} is not supported" in str(error) and "bits, group_size" in str(error)


@pytest.mark.parametrize("enter", [by_torch_compile, by_method, by_specache])
def test_unknown_option_is_refused(enter: Callable[..., Any]) -> None:
    with pytest.raises((ConfigError, BackendCompilerFailed)) as raised, torch.no_grad():
        enter(own(), group_sise=64)(tokens(8, seed=0), None)
    error = cause(raised.value)
    assert isinstance(error, ConfigError) and isinstance(error, ValueError)
    assert "Unknown option 'group_sise'. Did you mean 'group_size'?" in str(error)
    assert "Valid options: policy, bits, group_size" in str(error)


def test_wrapper_takes_no_second_options() -> None:
    with pytest.raises(ConfigError, match="bits: this module is compiled already"):
        specache_fx.compile(by_torch_compile(own()), bits=2)


def test_wrapper_of_another_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match='not with "specache"'):
        specache_fx.compile(torch.compile(own(), backend="eager"))


# generate() ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enter", [by_method, by_specache, by_specache_on_wrapper])
def test_generate_really_uses_the_backend(enter: Callable[..., Any]) -> None:
    kwargs = {**left_padded(), "max_new_tokens": 20, "do_sample": False}
    expected = build("plain", 1).generate(**kwargs)
    out = enter(build("plain", 1)).generate(**kwargs, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    stats = specache_fx.stats(out.past_key_values)
    assert stats.steps == 19 and stats.kv_len == 31


def test_generate_of_a_bare_wrapper_bypasses_the_backend() -> None:
    """Why `specache_fx.compile` takes wrappers: torch binds `generate` to the module inside."""
    wrapper = by_torch_compile(build("plain", 1))
    out = wrapper.generate(**left_padded(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(CacheHandleError, match="has no KV cache of specache"):
        specache_fx.stats(out.past_key_values)
