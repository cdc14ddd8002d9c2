"""Ways of generating, one after another on one compiled model, for models whose caches have other shapes.

They take minutes: `make test-all` runs them. `test_generation.py` has them by day, for one model.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from support.ways import (
    EXACT,
    PADDED,
    WAYS,
    arguments,
    conversation,
    crop_and_go_on,
    fork_and_go_on_with_both,
    generate,
    own_loop,
    step,
)
from support.zoo import SMALL, WINDOW, build
from torch import nn

import specache_fx

pytestmark = pytest.mark.nightly
# Windows beside global layers; windows, sinks and experts; latents and experts; experts.
NAMES = ("gemma3_text", "gpt_oss-window", "deepseek_v3", "mixtral")
_WINDOWED = NAMES[:2]
# transformers itself leaves no layer out there, and runs past the end of the shorter cache.
NOT_BY_TRANSFORMERS = {("gpt_oss-window", "early_exit")}


@cache
def eager(name: str) -> nn.Module:
    return build(name)


@pytest.fixture(scope="module", params=product(NAMES, ("traced", "untraced")), ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    torch._dynamo.reset()
    name, prompts = request.param
    return name, specache_fx.compile(build(name), **SMALL, bits=16, prompts=prompts)


def test_ways_equal_eager(pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    for way in WAYS:
        prompt, kwargs = arguments(way, name)
        if (name, way) in NOT_BY_TRANSFORMERS:
            with pytest.raises(IndexError):
                generate(eager(name), prompt, **kwargs)
            eager.cache_clear()
            continue
        expected = generate(eager(name), prompt, **kwargs)
        assert torch.equal(generate(model, prompt, **kwargs), expected), way


def test_one_cache_over_several_calls(pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    assert torch.equal(conversation(model), conversation(eager(name)))
    for use in (fork_and_go_on_with_both, *(() if name in _WINDOWED else (crop_and_go_on,))):
        torch.testing.assert_close(use(model), use(eager(name)), **EXACT)


def test_a_cache_of_the_uncompiled_model_is_taken_over(pair: tuple[str, nn.Module]) -> None:
    name, model = pair
    ids = PADDED["input_ids"][1:2].repeat(1, 2)
    assert ids.shape[1] > WINDOW
    token = torch.tensor([[7]])
    ours = own_loop(model, token, 12, step(eager(name), ids)[1])
    theirs = own_loop(eager(name), token, 12, step(eager(name), ids)[1])
    torch.testing.assert_close(ours, theirs, **EXACT)
